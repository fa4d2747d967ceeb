"""Engines that share a store: what one has written, another one serves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from tests.cache.l3.s3_server import BUCKET, S3Server, s3_server
from tests.e2e.calls import collect, greedy, ids
from tests.e2e.server import TINY, Server, serving, wait_for

PAGE = 8
FLAGS = (
    f"--model {TINY} --page-size {PAGE} --max-num-seqs 2 --max-batched-tokens 64 --max-mixed-tokens 16 "
    "--max-model-len 256 --batch-invariant --l1-pages 64 --served-model-name tiny --load-policy always"
).split()
PROMPT = [3 + i % 97 for i in range(50)]
FULL = len(PROMPT) // PAGE * PAGE


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["directory", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, str]]:
    """A store that all engines reach: its location, and the environment that it needs."""
    if request.param == "directory":
        return str(tmp_path / "store"), {}
    server: S3Server = request.getfixturevalue("bucket")
    return f"s3://{BUCKET}/shared", server.variables


def _ask(server: Server, prompt: list[int] = PROMPT) -> tuple[tuple[int, ...], dict[str, Any]]:
    """An answer's tokens, and its usage."""
    request = pb.GenerateRequest(token_ids=ids(prompt), sampling=greedy(12, ignore_eos=True))
    answer = collect(server.stub.Generate(request))
    return tuple(answer.choices[0].token_ids), answer.usage


def _start(stack: ExitStack, at: Path, owner: str, store: tuple[str, dict[str, str]]) -> Server:
    directory = at / owner
    directory.mkdir()
    location, variables = store
    return stack.enter_context(
        serving(directory, *FLAGS, "--l3-dir", location, "--l3-owner", owner, **variables)
    )


def _foreign(server: Server) -> int:
    """Pages of other owners that it knew when it started."""
    found = re.search(r"under owner \S+: \d+ pages of its own, (\d+) of others", server.stderr)
    assert found is not None
    return int(found[1])


def _found_in_l3(server: Server, prompt: list[int]) -> int:
    cache: Any = pb_grpc.CacheStub(server.channel)
    request = pb.LookupRequest(prefix=pb.Prefix(token_ids=ids(prompt)))
    return cache.Lookup(request, timeout=10).cached_by_tier.l3


def test_an_engine_started_elsewhere_serves_what_a_stopped_one_has_written(
    tmp_path: Path, store: tuple[str, dict[str, str]]
) -> None:
    with ExitStack() as stack:
        first = _start(stack, tmp_path, "first", store)
        tokens, usage = _ask(first)
        assert usage["cached_tokens"] == 0
        first.terminate()
        assert first.process.wait(60) == 0
        second = _start(stack, tmp_path, "second", store)
        assert _foreign(second) >= FULL // PAGE
        again, usage = _ask(second)
        assert again == tokens
        assert usage["cached_by_tier"]["l3"] == FULL


def test_engines_that_run_side_by_side_notice_each_others_pages(
    tmp_path: Path, store: tuple[str, dict[str, str]]
) -> None:
    with ExitStack() as stack:
        first, second = (_start(stack, tmp_path, owner, store) for owner in ("one", "two"))
        prompt = [9, *PROMPT[1:]]
        assert _found_in_l3(second, prompt) == 0
        tokens, _ = _ask(first, prompt)
        wait_for(lambda: _found_in_l3(second, prompt) == FULL, "the other's pages are noticed", 30)
        again, usage = _ask(second, prompt)
        assert again == tokens
        assert usage["cached_by_tier"]["l3"] == FULL
