from __future__ import annotations

import pytest

from jkv.cache.l1 import L1Counts
from jkv.engine.report import ActivityReport, describe
from jkv.engine.stats import EngineStats

L1 = L1Counts(total=100, free=70, in_use=10, cached=20)


def stats(**counts: int) -> EngineStats:
    return EngineStats(l1=L1, **counts)


def test_the_line_has_the_speed_and_hit_rate_since_the_snapshot_before() -> None:
    before = stats(prompt_tokens=1000, cached_tokens=900, generated_tokens=50)
    now = stats(prompt_tokens=1400, cached_tokens=1000, generated_tokens=75, running=3, waiting=2)
    assert describe(before, now, 10.0) == (
        "running 3, waiting 2, prompt 40.0 tokens/s, generated 2.5 tokens/s, "
        "L1 10 pages in use + 20 cached + 70 free = 100, hit rate 25.0%"
    )


def test_without_prompts_there_is_no_hit_rate() -> None:
    assert describe(stats(), stats(generated_tokens=1), 1.0).endswith("hit rate -")


def test_preemptions_are_told_where_there_were_some() -> None:
    assert describe(stats(preemptions=1), stats(preemptions=4), 1.0).endswith(", preempted 3")


def test_a_line_is_due_after_every_period_of_work() -> None:
    report = ActivityReport(stats(), every_s=10.0)
    report.resume(1000.0)
    lines = [report.observe(stats(generated_tokens=2 * i), 1000.0 + i) for i in range(1, 21)]
    due = [number for number, line in enumerate(lines, start=1) if line]
    assert due == [10, 20]
    assert all("generated 2.0 tokens/s" in (lines[number - 1] or "") for number in due)


@pytest.mark.parametrize("gap", [0.0, 3600.0])
def test_time_without_work_counts_for_nothing(gap: float) -> None:
    report = ActivityReport(stats(), every_s=10.0)
    report.resume(0.0)
    assert report.observe(stats(generated_tokens=20), 6.0) is None
    report.resume(6.0 + gap)
    assert report.observe(stats(generated_tokens=30), 9.0 + gap) is None
    line = report.observe(stats(generated_tokens=40), 10.0 + gap)
    assert line is not None
    assert "generated 4.0 tokens/s" in line
