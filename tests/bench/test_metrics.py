from __future__ import annotations

import pytest

from jkv.bench.metrics import Record, gaps_during, prefill_rate, spread, summarize
from jkv.bench.slo import Slo

# TTFT 1 s; gaps 0.5, 0.5 and 1 s.
STEADY = Record(
    sent_at=10.0,
    ended_at=13.0,
    token_times=(11.0, 11.5, 12.0, 13.0),
    prompt_tokens=100,
    output_tokens=4,
    cached_tokens=60,
)
# TTFT 2 s; one gap of 2 s.
SLOW = Record(
    sent_at=12.0,
    ended_at=16.0,
    token_times=(14.0, 16.0),
    prompt_tokens=100,
    output_tokens=2,
    cached_tokens=0,
)
FAILED = Record(sent_at=9.0, ended_at=20.0, token_times=(9.5,), prompt_tokens=100, error="refused")


def test_a_record_gives_the_latencies() -> None:
    assert STEADY.ttft == 1.0
    assert STEADY.e2e == 3.0
    assert STEADY.gaps == [0.5, 0.5, 1.0]
    assert STEADY.tpot == pytest.approx(2 / 3)


def test_one_token_has_no_tpot_and_no_gaps() -> None:
    record = Record(sent_at=0.0, ended_at=1.0, token_times=(1.0,), output_tokens=1)
    assert record.tpot is None
    assert record.gaps == []


def test_tpot_divides_by_the_servers_count_where_chunks_hold_several_tokens() -> None:
    record = Record(sent_at=0.0, ended_at=3.0, token_times=(1.0, 2.0, 3.0), output_tokens=9)
    assert record.tpot == 0.25


def test_spread_interpolates() -> None:
    values = spread([float(value) for value in range(101)])
    assert values is not None
    assert (values.p50, values.p90, values.p99, values.mean) == (50, 90, 99, 50)
    assert spread([]) is None


def test_a_summary_counts_failures_and_leaves_them_out_of_latencies() -> None:
    summary = summarize([STEADY, SLOW, FAILED], output_len=4, one_at_a_time=False, slo=None)
    assert (summary.requests, summary.failed, summary.errors, summary.short_outputs) == (
        3,
        1,
        ("refused",),
        1,
    )
    assert summary.duration_s == 11.0
    assert (summary.input_tokens, summary.output_tokens, summary.cached_tokens) == (200, 6, 60)
    assert summary.hit_rate == 0.3
    assert summary.requests_per_s == pytest.approx(2 / 11)
    assert summary.input_tokens_per_s == pytest.approx(200 / 11)
    assert summary.output_tokens_per_s == pytest.approx(6 / 11)
    assert summary.ttft is not None
    assert summary.ttft.mean == 1.5
    assert summary.itl is not None
    assert summary.itl.mean == 1.0
    assert summary.goodput_requests_per_s is None
    assert summary.prefill_tokens_per_s is None


def test_a_run_in_which_all_failed_has_no_latencies() -> None:
    summary = summarize([FAILED], output_len=1, one_at_a_time=True, slo=Slo(ttft_s=100))
    assert (summary.failed, summary.ttft, summary.itl, summary.hit_rate) == (1, None, None, None)
    assert (summary.requests_per_s, summary.goodput_requests_per_s, summary.prefill_tokens_per_s) == (
        0,
        0,
        None,
    )


def test_prefill_counts_what_no_cache_served() -> None:
    summary = summarize([STEADY, SLOW], output_len=2, one_at_a_time=True, slo=None)
    assert summary.prefill_tokens_per_s == pytest.approx((40 + 100) / 3)
    assert prefill_rate([]) is None


def test_unreported_cached_tokens_leave_the_hit_rate_open() -> None:
    silent = Record(sent_at=0.0, ended_at=1.0, token_times=(1.0,), prompt_tokens=5, output_tokens=1)
    summary = summarize([STEADY, silent], output_len=1, one_at_a_time=True, slo=None)
    assert summary.cached_tokens is None
    assert summary.hit_rate is None


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(), 2),
        (Slo(ttft_s=1.0), 1),
        (Slo(tbt_s=0.9), 0),  # STEADY's mean gap would pass, its largest does not
        (Slo(tbt_s=1.0), 1),
        (Slo(e2e_s=4.0), 2),
        (Slo(ttft_s=2.0, tbt_s=2.0, e2e_s=3.5), 1),
    ],
)
def test_goodput_needs_every_term(slo: Slo, good: int) -> None:
    summary = summarize([STEADY, SLOW, FAILED], output_len=2, one_at_a_time=False, slo=slo)
    assert summary.goodput_requests_per_s == pytest.approx(good / 11)


def test_gaps_during_takes_those_that_overlap_a_span() -> None:
    assert gaps_during([STEADY], [(11.2, 11.4)]) == [0.5]
    assert gaps_during([STEADY], [(11.9, 12.1)]) == [0.5, 1.0]
    assert gaps_during([STEADY, SLOW], [(12.5, 15.0), (13.5, 14.5)]) == [1.0, 2.0]
    assert gaps_during([STEADY], [(12.0, 12.0), (13.0, 14.0), (10.0, 11.0)]) == []
