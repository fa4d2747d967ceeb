from __future__ import annotations

from pathlib import Path

import pytest

from jkv.bench.trace_file import TraceRequest, ideal_hit_tokens, lru_hit_tokens, read_trace
from jkv.errors import ConfigError

from .traces import make_trace


def request(*ids: int, length: int | None = None) -> TraceRequest:
    return TraceRequest(input_length=length or 512 * len(ids), hash_ids=ids)


def test_a_trace_is_read(tmp_path: Path) -> None:
    requests = read_trace(make_trace(tmp_path / "trace.jsonl", requests=50))
    assert len(requests) == 50
    for each in requests:
        assert each.hash_ids[: len(each.full_ids)] == each.full_ids
        assert 0 <= len(each.hash_ids) - len(each.full_ids) <= 1
        assert each.tokens_of(len(each.hash_ids)) == each.input_length


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "Expecting"),
        ("7", "not subscriptable"),
        ('{"input_length": 5}', "hash_ids"),
        ('{"input_length": 0, "hash_ids": []}', "input_length 0"),
        ('{"input_length": "9", "hash_ids": [1]}', "input_length '9'"),
        ('{"input_length": 513, "hash_ids": [1]}', "1 hash_ids for 513 tokens"),
        ('{"input_length": 5, "hash_ids": [-1]}', "below 2\\^32"),
    ],
)
def test_a_line_of_another_kind_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 5, "hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(ConfigError, match=f"--file .*: line 2 .*{problem}"):
        read_trace(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--file .*missing: No such file"):
        read_trace(tmp_path / "missing")
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match=r"--file .*empty: has no requests"):
        read_trace(tmp_path / "empty")


def test_an_infinite_cache_serves_every_prefix_seen_before() -> None:
    requests = [request(1, 2, 3, length=1200), request(1, 2, 4), request(9, 2), request(1, 2, 3, length=1200)]
    assert ideal_hit_tokens(requests) == 1024 + 1200


def test_a_plain_list_drops_the_start_of_the_oldest_prompt() -> None:
    requests = [request(1, 2), request(3), request(1, 2)]
    assert lru_hit_tokens(requests, 3) == 1024
    assert lru_hit_tokens(requests, 2) == 0
    assert lru_hit_tokens([request(1, 2), request(3), request(1)], 2) == 0
