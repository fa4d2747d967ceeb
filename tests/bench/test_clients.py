from __future__ import annotations

import asyncio
import sys

import pytest

from jkv.bench import http_client
from jkv.bench.clients import Chunk, RequestFailedError, TargetError, Usage, choose_model, open_client
from jkv.errors import ConfigError


@pytest.mark.parametrize(
    "target",
    [
        "",
        "host:1",
        "grpc://host",
        "grpc://:5",
        "grpc://host:1/v1",
        "ftp://host:1",
        "http://",
        "http://h:1/v1?x=1",
    ],
)
def test_other_targets_are_refused_by_name(target: str) -> None:
    with pytest.raises(ConfigError, match=r"--target .*: expected grpc://HOST:PORT or http://HOST:PORT"):
        open_client(target)


@pytest.mark.parametrize("target", ["grpc://host:70000", "http://host:port"])
def test_a_bad_port_is_refused_by_name(target: str) -> None:
    with pytest.raises(ConfigError, match=f"--target {target}: [Pp]ort"):
        open_client(target)


@pytest.mark.parametrize("target", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_http_targets_end_in_v1(target: str) -> None:
    async def base_url() -> str:
        client = open_client(target)
        await client.close()
        assert isinstance(client, http_client.HttpClient)
        return client.base_url

    assert asyncio.run(base_url()) == "http://h:1/v1"


def test_without_the_bench_extra_http_targets_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "jkv.bench.http_client")
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(ConfigError, match=r"pip install 'jkv\[bench\]'"):
        open_client("http://localhost:1")


def test_the_only_model_needs_no_name() -> None:
    assert choose_model(None, ["a"]) == "a"
    assert choose_model("b", ["a", "b"]) == "b"
    with pytest.raises(ConfigError, match=r"--model: .* a, b"):
        choose_model(None, ["a", "b"])
    with pytest.raises(ConfigError, match="--model c: the target serves a, b"):
        choose_model("c", ["a", "b"])
    with pytest.raises(TargetError, match="no model"):
        choose_model(None, [])


def test_http_events_become_chunks() -> None:
    def event(text: str, finish: str | None = None) -> dict[str, object]:
        return {"choices": [{"text": text, "finish_reason": finish}]}

    assert http_client.chunk_of(event("hi")) == Chunk(tokens=1)
    assert http_client.chunk_of(event("")) == Chunk(tokens=1)
    assert http_client.chunk_of(event("hi", "length")) == Chunk(tokens=1, finish_reason="length")
    assert http_client.chunk_of(event("", "stop")) == Chunk(finish_reason="stop")
    counts = {"prompt_tokens": 9, "completion_tokens": 2}
    without = Usage(prompt_tokens=9, completion_tokens=2, cached_tokens=None)
    assert http_client.chunk_of({"choices": [], "usage": counts}) == Chunk(usage=without)
    details = {"prompt_tokens_details": {"cached_tokens": 8}}
    cached = Usage(prompt_tokens=9, completion_tokens=2, cached_tokens=8)
    assert http_client.chunk_of({"choices": [], "usage": counts | details}) == Chunk(usage=cached)
    with pytest.raises(RequestFailedError, match="out of memory"):
        http_client.chunk_of({"error": {"message": "out of memory"}})
