from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jkv.cache.l3.budget import DAY_S, WriteBudget
from tests.cache.clock import Clock

MORNING = 1000 * DAY_S + 5.0


def budget(
    clock: Clock, *, pace: float | None = None, daily: int | None = None, saved: bytes | None = None
) -> WriteBudget:
    return WriteBudget(bytes_per_s=pace, daily_bytes=daily, clock=clock, wall=clock, saved=saved)


def test_without_limits_nothing_waits() -> None:
    free = budget(Clock(MORNING))
    assert [free.reserve(10**9) for _ in range(5)] == [0.0] * 5
    assert not free.unsaved


def test_writes_are_paced() -> None:
    clock = Clock(MORNING)
    paced = budget(clock, pace=100)
    assert [paced.reserve(50) for _ in range(3)] == [0.0, 0.5, 1.0]
    clock.now += 1.25
    assert paced.reserve(50) == 0.25
    clock.now += 60
    assert paced.reserve(50) == 0.0  # time without writes is not saved up
    assert paced.reserve(50) == 0.5


def test_the_days_bytes_run_out_and_come_back() -> None:
    clock = Clock(MORNING)
    daily = budget(clock, daily=100)
    assert daily.reserve(60) == 0.0
    assert daily.reserve(60) is None
    assert daily.reserve(40) == 0.0
    assert daily.reserve(1) is None
    clock.now += DAY_S
    assert daily.reserve(100) == 0.0


def test_a_clean_restart_goes_on_exactly() -> None:
    clock = Clock(MORNING)
    before = budget(clock, daily=1000)
    before.reserve(300)
    after = budget(clock, daily=1000, saved=before.final_state())
    assert after.reserve(701) is None
    assert after.reserve(700) == 0.0


def test_another_day_starts_afresh_after_a_restart() -> None:
    clock = Clock(MORNING)
    before = budget(clock, daily=1000)
    before.reserve(1000)
    clock.now += DAY_S
    assert budget(clock, daily=1000, saved=before.final_state()).reserve(1000) == 0.0


def test_a_clock_set_back_gives_no_second_budget() -> None:
    clock = Clock(MORNING)
    before = budget(clock, daily=1000)
    before.reserve(1000)
    clock.now -= DAY_S
    assert budget(clock, daily=1000, saved=before.final_state()).reserve(1) is None


def test_a_damaged_state_is_as_none() -> None:
    for saved in (b"", b"\0\0", b"[]", b'{"day": 1}', b'{"day": "x", "bytes": 2}'):
        assert budget(Clock(MORNING), daily=10, saved=saved).reserve(10) == 0.0


@given(st.lists(st.integers(1, 400), max_size=40), st.integers(1, 5000))
def test_a_crash_never_exceeds_the_day(sizes: list[int], daily: int) -> None:
    """After every write the process dies; only what was saved is known to the next one."""
    clock, saved, written = Clock(MORNING), None, 0
    for size in sizes:
        one = budget(clock, daily=daily, saved=saved)
        if one.reserve(size) is not None:
            if one.unsaved:
                saved = one.state()
            written += size
    assert written <= daily


def test_state_is_saved_now_and_then_not_for_every_page() -> None:
    one, saves = budget(Clock(MORNING), daily=100_000), 0
    for _ in range(10_000):
        one.reserve(10)
        if one.unsaved:
            one.state()
            saves += 1
    assert 100 < saves < 300
