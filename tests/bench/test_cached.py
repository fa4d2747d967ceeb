from __future__ import annotations

import pytest

from jkv.bench.cached import CachedOptions, check_pairs, expected_cached
from jkv.bench.metrics import Record
from jkv.errors import ConfigError


def record(cached_tokens: int | None, error: str = "") -> Record:
    return Record(sent_at=0.0, ended_at=1.0, token_times=(1.0,), cached_tokens=cached_tokens, error=error)


def test_full_pages_must_hit_all_but_the_last_token() -> None:
    assert expected_cached(512, 64) == 511
    assert expected_cached(513, 64) == 512
    assert expected_cached(600, 64) == 576
    assert expected_cached(600, None) == 1


@pytest.mark.parametrize(
    ("cold", "again", "problem"),
    [
        (record(0), record(511), None),
        (record(None), record(511), None),
        (record(64), record(511), "64 of a cold run were cached: give another --seed"),
        (record(0), record(448), "448 were cached the second time, not 511"),
        (record(0), record(None), "does not report cached tokens"),
        (record(0), record(0, error="refused"), "refused"),
    ],
)
def test_a_run_that_is_not_what_it_is_called_is_an_error(
    cold: Record, again: Record, problem: str | None
) -> None:
    errors = check_pairs([(cold, again)], 512, 64)
    assert len(errors) == (problem is not None)
    assert all(error.startswith("512 tokens: ") and (problem or "") in error for error in errors)


@pytest.mark.parametrize("text", ["", "512,", "0", "-1", "5.5"])
def test_lengths_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--input-lens {text}: "):
        CachedOptions(target="grpc://h:1", input_lens=text)


def test_lengths_are_comma_separated() -> None:
    assert CachedOptions(target="grpc://h:1", input_lens="16, 32").lengths == (16, 32)
