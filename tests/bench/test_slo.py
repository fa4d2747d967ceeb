from __future__ import annotations

import pytest

from jkv.bench.slo import Slo, parse_slo


def test_terms_take_seconds_and_milliseconds() -> None:
    assert parse_slo("ttft=2s,tbt=100ms, e2e=1.5s") == Slo(ttft_s=2.0, tbt_s=0.1, e2e_s=1.5)
    assert parse_slo("tbt=50ms") == Slo(tbt_s=0.05)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=2", "ttft=-1s", "tpot=2s", "ttft=2s,", "ttft=2m"])
def test_other_terms_are_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is not ttft=TIME, tbt=TIME or e2e=TIME"):
        parse_slo(text)


def test_a_limit_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="ttft comes twice"):
        parse_slo("ttft=2s,ttft=3s")
