from __future__ import annotations

import pytest

from jkv.cache.gate import PROBE_AFTER_S, CostGate
from jkv.cache.pages import Tier
from tests.cache.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gate(clock: Clock) -> CostGate:
    return CostGate(page_size=64, clock=clock)


def test_what_is_not_measured_is_loaded(gate: CostGate) -> None:
    assert gate.worth_loading(Tier.L3, 1)
    gate.record_load(Tier.L3, 1, 1000.0)
    assert gate.worth_loading(Tier.L3, 1), "prefill is not measured yet"
    gate.record_prefill(64_000, 1.0)
    assert not gate.worth_loading(Tier.L3, 1)
    assert gate.worth_loading(Tier.L2, 1), "another tier"
    assert gate.gated == 1


def test_the_faster_way_is_taken(gate: CostGate) -> None:
    gate.record_prefill(640, 1.0)  # 0.1 s a page
    gate.record_load(Tier.L2, 10, 0.9)
    assert gate.worth_loading(Tier.L2, 10)
    for _ in range(40):
        gate.record_load(Tier.L2, 10, 1.1)
    assert not gate.worth_loading(Tier.L2, 10)
    assert gate.prefill_tokens_per_s == 640


def test_a_fixed_cost_is_worth_paying_for_long_prefixes_only(gate: CostGate) -> None:
    gate.record_prefill(640, 1.0)
    gate.record_load(Tier.L3, 1, 0.51)
    gate.record_load(Tier.L3, 101, 1.51)  # 0.5 s and 0.01 s a page
    assert not gate.worth_loading(Tier.L3, 5)
    assert gate.worth_loading(Tier.L3, 6)
    assert gate.load_seconds(Tier.L3, 50) == pytest.approx(1.0)


def test_a_gated_tier_is_probed_once_now_and_then(gate: CostGate, clock: Clock) -> None:
    gate.record_prefill(640, 1.0)
    gate.record_load(Tier.L3, 1, 5.0)
    clock.now += PROBE_AFTER_S - 1
    assert not gate.worth_loading(Tier.L3, 1)
    clock.now += 1
    assert gate.worth_loading(Tier.L3, 1)
    assert not gate.worth_loading(Tier.L3, 1), "the probe is on its way"
    gate.record_load(Tier.L3, 1, 0.01)
    assert gate.worth_loading(Tier.L3, 1), "it has become faster"
