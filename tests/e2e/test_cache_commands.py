"""`jkv cache` against a real server with all three tiers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from jkv.client import main
from tests.e2e.server import TINY, Server, serving

_PAGE = 8
_PROMPT = ",".join(str(1 + number * 7 % 90) for number in range(5 * _PAGE + 3))


@pytest.fixture(scope="module")
def tiered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("tiered")
    flags = f"--model {TINY} --page-size {_PAGE} --l1-pages 40 --l2-gib 16MiB --l3-dir {directory / 'pages'}"
    scheduling = "--max-num-seqs 2 --max-batched-tokens 64 --max-mixed-tokens 32 --max-model-len 256"
    with serving(directory, *f"{flags} {scheduling} --load-policy always".split()) as server:
        yield server


class _Client:
    """Runs commands about one prompt under a salt of its own."""

    def __init__(self, server: Server, capsys: pytest.CaptureFixture[str], salt: str) -> None:
        self._server, self._capsys = server, capsys
        self._prompt = ["--token-ids", _PROMPT, "--salt", salt]

    def plain(self, *argv: str) -> dict[str, Any]:
        assert main([*argv, "--address", self._server.address, "--json"]) == 0
        return json.loads(self._capsys.readouterr().out)

    def about(self, *argv: str) -> dict[str, Any]:
        return self.plain(*argv, *self._prompt)

    def generate(self) -> tuple[list[int], dict[str, int]]:
        answer = self.about("generate", "--max-tokens", "4", "--temperature", "0", "--ignore-eos")
        tiers = {tier: count for tier, count in answer["usage"]["cached_by_tier"].items() if count}
        return answer["choices"][0]["token_ids"], tiers

    def lookup(self) -> dict[str, int]:
        found = self.about("cache", "lookup")["cached_by_tier"]
        return {tier: count for tier, count in found.items() if count}


def test_a_prompt_is_found_where_the_commands_have_put_it(
    tiered: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    client, all_pages = _Client(tiered, capsys, "moved"), 5 * _PAGE
    assert client.lookup() == {}
    answer, tiers = client.generate()
    assert tiers == {}
    client.plain("cache", "drain")
    assert client.lookup() == {"l1": all_pages}
    for flushed, tier in ((("l1",), "l2"), (("l1", "l2"), "l3")):
        assert client.plain("cache", "flush", *flushed)["pages"].keys() == set(flushed)
        assert client.lookup() == {tier: all_pages}
        assert client.generate() == (answer, {tier: all_pages})
        assert client.lookup() == {"l1": all_pages}
    client.plain("cache", "flush", "l1", "l2")
    assert client.about("cache", "prefetch", "--tier", "l2") == {"tokens": all_pages}
    assert client.lookup() == {"l2": all_pages}
    assert client.about("cache", "prefetch") == {"tokens": all_pages}
    assert client.lookup() == {"l1": all_pages}
    assert client.plain("cache", "demote", "l1")["pages"] >= 5
    assert client.lookup() == {"l2": all_pages}
    assert client.generate() == (answer, {"l2": all_pages})


def test_pins_hold_and_evictions_leave_other_salts_alone(
    tiered: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = _Client(tiered, capsys, "one"), _Client(tiered, capsys, "other")
    answer, _ = one.generate()
    other.generate()
    assert one.about("cache", "pin", "--ttl", "600") == {"pages": 5}
    assert one.plain("cache", "stats")["tiers"]["l1"]["pinned_pages"] == 5
    assert one.about("cache", "unpin") == {"pages": 5}
    assert one.plain("cache", "stats")["tiers"]["l1"]["pinned_pages"] == 0
    assert one.about("cache", "evict") == {"pages": 5}
    assert one.lookup() == {}
    assert other.lookup() == {"l1": 5 * _PAGE}
    assert one.generate() == (answer, {})
    assert one.plain("cache", "evict", "--salt", "other")["pages"] >= 5
    assert other.lookup() == {}
    assert one.lookup() == {"l1": 5 * _PAGE}


def test_stats_add_up(tiered: Server, capsys: pytest.CaptureFixture[str]) -> None:
    client = _Client(tiered, capsys, "counted")
    before = client.plain("cache", "stats")["tiers"]
    client.generate()
    client.generate()
    client.plain("cache", "drain")
    stats = client.plain("cache", "stats")
    after = stats["tiers"]
    assert list(after) == ["l1", "l2", "l3"]

    def grown(tier: str, name: str) -> int:
        return after[tier][name] - before[tier][name]

    assert (grown("l1", "hits"), grown("l1", "hit_tokens"), grown("l1", "misses")) == (5, 5 * _PAGE, 5)
    assert (grown("l2", "stores"), grown("l3", "stores")) == (5, 5)
    assert (grown("l2", "misses"), grown("l3", "misses")) == (5, 5)
    assert stats["pending_writes"] == 0
    for tier in after.values():
        assert tier["bytes"] <= tier["bytes_capacity"]
        assert tier["pages"] <= tier["pages_capacity"]
        assert (tier["errors_by_reason"], tier["breaker"]) == ({}, "closed")
