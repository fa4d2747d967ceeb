"""`jkv cache` against the real service with a scripted cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jkv.cache.control import Prefix
from jkv.cache.pages import Tier
from jkv.client import main
from jkv.errors import FailedPreconditionError
from tests.client.server import Capture, Server, feed_stdin, run_client

_PROMPT = "x" * 8
_PREFIX = Prefix(token_ids=tuple(b"x" * 8))


def test_stats_show_a_column_for_each_tier(server: Server, capsys: Capture) -> None:
    assert run_client(server, "cache", "stats") == 0
    assert capsys.readouterr().out.splitlines() == [
        "                               l1                     l3",
        "pages                   10 of 100              30 of 300",
        "size           0.0 MiB of 0.0 MiB  30.0 MiB of 300.0 MiB",
        "pinned pages                    0                      3",
        "hits, pages                    11                     31",
        "hits, tokens                   88                    248",
        "misses, pages                   0                     32",
        "loads                           0                     34",
        "stores                          0                     35",
        "drops                           0                     36",
        "evictions                       0                     33",
        "quarantined                     0                      1",
        "read                            -             1.50 GiB/s",
        "written                         -                      -",
        "breaker                    closed              half-open",
        "l3 errors: checksum 1, timeout 2",
        "4 pending writes, 5 gated and 6 late loads, prefill 812.5 tokens/s",
    ]


def test_stats_as_json_have_every_field(server: Server, capsys: Capture) -> None:
    assert run_client(server, "cache", "stats", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document["tiers"]) == ["l1", "l3"]
    l3 = document["tiers"]["l3"]
    assert (l3["hits"], l3["errors_by_reason"]) == (31, {"checksum": 1, "timeout": 2})
    assert (l3["breaker"], l3["bytes"], l3["read_bytes_per_s"]) == ("half-open", 30 * 2**20, 1.5 * 2**30)
    del document["tiers"]
    assert document == {
        "pending_writes": 4,
        "prefill_tokens_per_s": 812.5,
        "gated_loads": 5,
        "late_loads": 6,
    }


@pytest.mark.parametrize(
    ("argv", "call", "text", "document"),
    [
        (
            ["lookup", "x"],
            ("lookup", Prefix(token_ids=(120,))),
            "24 of 1 tokens are cached: l1 8, l3 16",
            {
                "prompt_tokens": 1,
                "cached_tokens": 24,
                "cached_by_tier": {"l1": 8, "l2": 0, "l3": 16, "peer": 0},
            },
        ),
        (["pin", _PROMPT], ("pin", _PREFIX, None), "pinned 3 pages", {"pages": 3}),
        (["pin", _PROMPT, "--ttl", "1.5"], ("pin", _PREFIX, 1.5), "pinned 3 pages", {"pages": 3}),
        (["unpin", _PROMPT], ("unpin", _PREFIX), "unpinned 2 pages", {"pages": 2}),
        (["prefetch", _PROMPT], ("prefetch", _PREFIX, Tier.L1), "24 tokens are in l1", {"tokens": 24}),
        (
            ["prefetch", _PROMPT, "--tier", "l2"],
            ("prefetch", _PREFIX, Tier.L2),
            "24 tokens are in l2",
            {"tokens": 24},
        ),
        (["demote", "l1"], ("demote", Tier.L1), "7 pages left l1", {"pages": 7}),
        (
            ["flush", "l1", "l2"],
            ("flush", (Tier.L1, Tier.L2)),
            "dropped 10 pages of l1, 20 pages of l2",
            {"pages": {"l1": 10, "l2": 20}},
        ),
        (["drain"], ("drain_writes",), "all writes are done", {}),
        (["evict", _PROMPT], ("evict", _PREFIX, None), "evicted 5 pages", {"pages": 5}),
        (["evict", "--salt", "s"], ("evict", None, "s"), "evicted 5 pages", {"pages": 5}),
        (["evict", "--salt", ""], ("evict", None, ""), "evicted 5 pages", {"pages": 5}),
    ],
)
def test_each_command_calls_the_cache_and_prints_its_answer(
    argv: list[str], call: tuple[object, ...], text: str, document: object, server: Server, capsys: Capture
) -> None:
    assert run_client(server, "cache", *argv) == 0
    assert capsys.readouterr() == (f"{text}\n", "")
    assert run_client(server, "cache", *argv, "--json") == 0
    assert json.loads(capsys.readouterr().out) == document
    assert server.cache.calls == [call, call]


def test_a_prefix_is_a_text_stdin_ids_or_a_chat(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = json.dumps([{"role": "system", "content": "be kind"}, {"role": "user", "content": "hé"}])
    file = tmp_path / "chat.json"
    file.write_text(chat, encoding="utf-8")
    rendered = "<system>be kind<user>hé"
    for argv, stdin, prompt in (
        (["abc"], b"", "abc"),
        (["-"], b"from a pipe", "from a pipe"),
        (["--token-ids", "97,98"], b"", "ab"),
        (["--messages", str(file)], b"", rendered),
        (["--messages", "-"], chat.encode(), rendered),
    ):
        feed_stdin(monkeypatch, stdin)
        assert run_client(server, "cache", "lookup", *argv, "--salt", "s", "--model", "bytes") == 0
        expected = Prefix(token_ids=tuple(prompt.encode()), cache_salt="s")
        assert server.cache.calls[-1] == ("lookup", expected)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["lookup"], ["lookup: give one of PROMPT", "--token-ids", "--messages"]),
        (["lookup", "x", "--token-ids", "1"], ["give one of PROMPT"]),
        (["pin", "x", "--ttl", "soon"], ["--ttl soon", "number"]),
        (["pin", "x", "--ttl", "inf"], ["--ttl inf", "finite"]),
        (["evict"], ["evict: give a prefix, or --salt alone"]),
        (["evict", "--salt", "\udcff"], ["--salt", "UTF-8"]),
        (["lookup", "--messages", "/no/such/file"], ["--messages /no/such/file", "No such file"]),
    ],
)
def test_unusable_arguments_are_one_line_and_status_2(
    argv: list[str], words: list[str], capsys: Capture
) -> None:
    assert main(["cache", *argv]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    "text", ["{", "{}", "[1]", '[{"role": "user"}]', '[{"role": "user", "content": 1}]', '"x"']
)
def test_a_chat_file_that_is_none_is_refused(text: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "chat.json"
    path.write_text(text)
    assert main(["cache", "lookup", "--messages", str(path)]) == 2
    assert f"--messages {path}: " in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["flush"], ["flush", "l4"], ["demote"], ["demote", "l3"], []])
def test_tiers_and_commands_are_named(argv: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["cache", *argv])
    assert exit_info.value.code == 2
    assert "usage: jkv cache" in capsys.readouterr().err


def test_a_refusal_says_why(server: Server, capsys: Capture) -> None:
    server.cache.failure = FailedPreconditionError("16 requests use the pages of l1")
    assert run_client(server, "cache", "flush", "l1") == 1
    assert capsys.readouterr().err == "error: FAILED_PRECONDITION: 16 requests use the pages of l1\n"
    assert run_client(server, "cache", "pin", "x") == 1
    assert "INVALID_ARGUMENT: prefix: must have a full page of 8 tokens, has 1" in capsys.readouterr().err
