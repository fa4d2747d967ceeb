from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.cache.speed import LinearCost, Speed


def test_an_unmeasured_speed_is_zero() -> None:
    assert Speed().per_s == 0
    assert LinearCost().seconds(5) == 0
    assert not LinearCost().measured


def test_a_long_transfer_counts_for_more_than_a_short_one() -> None:
    speed = Speed()
    speed.record(1000, 1.0)
    speed.record(1, 0.1)
    assert speed.per_s == pytest.approx((0.9 * 1000 + 1) / (0.9 + 0.1))


def test_old_measurements_fade() -> None:
    speed = Speed()
    speed.record(1, 1.0)
    for _ in range(60):
        speed.record(100, 1.0)
    assert speed.per_s == pytest.approx(100, rel=0.02)


def test_a_transfer_too_short_for_the_clock_is_no_error() -> None:
    speed = Speed()
    speed.record(10, 0.0)
    assert speed.per_s > 0


@given(st.floats(0, 10), st.floats(1e-4, 10), st.lists(st.integers(1, 100), min_size=2, unique=True))
def test_both_parts_of_a_cost_are_found(fixed: float, per_unit: float, amounts: list[int]) -> None:
    cost = LinearCost()
    for amount in [1, 200, *amounts]:
        cost.record(amount, fixed + per_unit * amount)
    for amount in (1, 50, 1000):
        assert cost.seconds(amount) == pytest.approx(fixed + per_unit * amount, rel=1e-4)


def test_equal_amounts_scale_in_proportion() -> None:
    cost = LinearCost()
    for _ in range(3):
        cost.record(10, 2.0)
    assert cost.seconds(5) == pytest.approx(1.0)


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 100)), min_size=1), st.integers(0, 10_000))
def test_noise_never_makes_a_cost_negative(measured: list[tuple[int, float]], amount: int) -> None:
    cost = LinearCost()
    for units, seconds in measured:
        cost.record(units, seconds)
    assert cost.seconds(amount) >= -1e-6
    assert cost.seconds(amount + 1) >= cost.seconds(amount) - 1e-6
