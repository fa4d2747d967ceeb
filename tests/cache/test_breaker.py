from __future__ import annotations

import pytest

from jkv.cache.breaker import (
    FAILURES_TO_OPEN,
    FIRST_COOL_DOWN_S,
    LONGEST_COOL_DOWN_S,
    Breaker,
    BreakerState,
)
from tests.cache.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock)


def fail(breaker: Breaker, times: int = FAILURES_TO_OPEN) -> None:
    for _ in range(times):
        breaker.failed()


def test_single_failures_do_not_open_it(breaker: Breaker) -> None:
    for _ in range(3):
        fail(breaker, FAILURES_TO_OPEN - 1)
        breaker.succeeded()
    assert breaker.state == "closed"
    assert breaker.allows()


def test_failures_in_a_row_open_it(breaker: Breaker, clock: Clock) -> None:
    fail(breaker)
    assert breaker.state is BreakerState.OPEN
    clock.now = FIRST_COOL_DOWN_S - 0.01
    assert not breaker.allows()


def test_one_probe_decides(breaker: Breaker, clock: Clock) -> None:
    fail(breaker)
    clock.now = FIRST_COOL_DOWN_S
    assert breaker.allows()
    assert breaker.state == "half-open"
    assert not breaker.allows(), "the probe is on its way"
    breaker.succeeded()
    assert breaker.state == "closed"
    fail(breaker, FAILURES_TO_OPEN - 1)
    assert breaker.allows(), "the count starts anew"


def test_cool_downs_double_up_to_a_bound_and_start_anew_after_a_success(
    breaker: Breaker, clock: Clock
) -> None:
    fail(breaker)
    waited = []
    for _ in range(9):
        start = clock.now
        while not breaker.allows():
            clock.now += 0.5
        waited.append(clock.now - start)
        breaker.failed()
    assert waited == [min(FIRST_COOL_DOWN_S * 2**i, LONGEST_COOL_DOWN_S) for i in range(9)]
    clock.now += LONGEST_COOL_DOWN_S
    assert breaker.allows()
    breaker.succeeded()
    fail(breaker)
    clock.now += FIRST_COOL_DOWN_S
    assert breaker.allows()


def test_a_probe_that_is_never_answered_is_followed_by_another(breaker: Breaker, clock: Clock) -> None:
    fail(breaker)
    clock.now = FIRST_COOL_DOWN_S
    assert breaker.allows()
    clock.now += FIRST_COOL_DOWN_S
    assert breaker.allows()


def test_outcomes_from_before_it_opened_change_nothing(breaker: Breaker, clock: Clock) -> None:
    fail(breaker)
    breaker.succeeded()
    breaker.failed()
    assert breaker.state is BreakerState.OPEN
    clock.now = FIRST_COOL_DOWN_S
    assert breaker.allows()
