from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jkv.router.load import EngineLoads, InFlight, NothingReported, loads_of


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _busy(**fields: int) -> NothingReported:
    return NothingReported(**fields)  # any object with these fields is a report


def _now(loads: EngineLoads, field: str) -> float:
    """What a choice would take for the load of this engine."""
    return getattr(loads_of([loads]), field)[0]


def test_requests_count_from_the_moment_they_are_sent_until_a_report_has_them() -> None:
    clock = Clock()
    loads = EngineLoads(clock)
    loads.take(_busy(running=1, prefill_tokens=10))
    loads.send([1, 2], 500, turn=1)
    loads.send([1, 3], 200, turn=4)
    assert (_now(loads, "requests"), _now(loads, "prefill_tokens"), _now(loads, "chosen_at")) == (3, 710, 4)
    clock.now += 0.001
    loads.take(_busy(running=1, prefill_tokens=10))  # they are still under way
    assert (_now(loads, "requests"), _now(loads, "prefill_tokens")) == (3, 710)
    clock.now += 0.05
    loads.take(_busy(running=2, waiting=1, prefill_tokens=650))
    assert (_now(loads, "requests"), _now(loads, "prefill_tokens")) == (3, 650)


def test_all_that_an_engine_reports_is_where_a_choice_looks_for_it() -> None:
    reported = NothingReported(
        running=1,
        waiting=2,
        prefill_tokens=30,
        max_num_seqs=4,
        prefill_tokens_per_s=5.0,
        l2_bytes_per_s=6.0,
        l3_bytes_per_s=7.0,
    )
    silent, loads = EngineLoads(Clock()), EngineLoads(Clock())
    loads.take(reported)
    loads.send([1], 100, turn=8)
    both = loads_of([silent, loads])
    assert [column[1] for column in both] == [4, 1, 130, 4, 0, 8, 5, 6, 7, 0, 0]
    assert both._fields[:9] == (
        "requests",
        "running",
        "prefill_tokens",
        "slots",
        "slot_s",
        "chosen_at",
        "reported_tokens_per_s",
        "l2_bytes_per_s",
        "l3_bytes_per_s",
    )
    assert [column[0] for column in both] == [0] * 11


def test_requests_whose_prompt_is_computed_do_not_count_as_prefill() -> None:
    loads = EngineLoads(Clock())
    sent = loads.send([1], 500, turn=1)
    loads.first_token(sent)
    assert _now(loads, "prefill_tokens") == 0
    assert loads.in_flight == 1
    loads.finish(sent)
    loads.finish(sent)
    assert loads.in_flight == 0


def test_the_pages_of_prompts_under_way_are_coming() -> None:
    loads = EngineLoads(Clock())
    first = loads.send([1, 2, 3, 4], 256, turn=1)
    second = loads.send([1, 2, 9], 64, turn=2)
    assert loads.coming_pages([1, 2, 3, 4, 5]) == 4
    assert loads.coming_pages([1, 2, 9, 10]) == 3
    assert loads.coming_pages([7, 8, 10]) == 0
    assert loads.coming_pages([]) == 0
    loads.first_token(first)
    assert loads.coming_pages([1, 2, 3, 4, 5]) == 2
    loads.finish(second)
    assert loads.coming_pages([1, 2, 3, 4, 5]) == 0


def test_slots_are_measured_from_the_first_token_to_the_end() -> None:
    clock = Clock()
    loads = EngineLoads(clock)
    assert _now(loads, "slot_s") == 0
    for seconds in (2.0, 4.0):
        sent = loads.send([], 0, turn=1)
        loads.first_token(sent)
        clock.now += seconds
        loads.finish(sent)
    assert _now(loads, "slot_s") == pytest.approx(3.0, rel=0.05)


def test_a_speed_is_believed_after_many_measurements_as_their_average_and_for_half_a_minute() -> None:
    clock = Clock()
    loads = EngineLoads(clock)

    def measure(speed: float) -> float:
        loads.take(NothingReported(prefill_tokens_per_s=speed))
        return _now(loads, "prefill_tokens_per_s")

    believed = [measure(900.0 + 200 * (number % 2)) for number in range(200)]
    assert believed[:99] == 99 * [0.0]
    assert believed[99:] == pytest.approx(101 * [1000.0], rel=0.01)
    assert measure(3000.0) < 1100  # one of a hundred
    clock.now += 20
    assert measure(3000.0) > 0  # nothing new
    clock.now += 11
    assert measure(3000.0) == 0
    assert measure(900.0) > 0
    measure(0.0)
    assert measure(900.0) == 0  # of another process


def test_busy_is_the_part_of_the_last_minute_in_which_there_were_prompts_to_compute() -> None:
    clock = Clock()
    loads = EngineLoads(clock)
    assert _now(loads, "busy") == 0
    for _ in range(300):
        for tokens, seconds in ((10, 0.5), (0, 1.5)):
            loads.take(_busy(prefill_tokens=tokens))
            clock.now += seconds
    assert _now(loads, "busy") == pytest.approx(0.25, abs=0.02)
    clock.now += 600
    assert _now(loads, "busy") < 0.01
    loads.take(_busy(prefill_tokens=10))
    clock.now += 60
    assert _now(loads, "busy") == pytest.approx(0.63, abs=0.01)


_CHAINS = [tuple(10 * branch + min(depth, branch) for depth in range(4)) for branch in range(3)]


class LoadMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.clock = Clock()
        self.loads = EngineLoads(self.clock)
        self.sent: list[InFlight] = []
        self.waiting: list[InFlight] = []

    @rule(pages=st.sampled_from(_CHAINS), length=st.integers(0, 4), passed=st.floats(0, 0.1))
    def send(self, pages: tuple[int, ...], length: int, passed: float) -> None:
        self.clock.now += passed
        self.sent.append(self.loads.send(pages[:length], 64 * length, turn=1))
        self.waiting.append(self.sent[-1])

    @rule(which=st.integers(0))
    def first_token(self, which: int) -> None:
        if self.sent:
            request = self.sent[which % len(self.sent)]
            self.loads.first_token(request)
            self.waiting = [one for one in self.waiting if one is not request]

    @rule(which=st.integers(0))
    def finish(self, which: int) -> None:
        if self.sent:
            request = self.sent.pop(which % len(self.sent))
            self.loads.finish(request)
            self.waiting = [one for one in self.waiting if one is not request]

    @rule(passed=st.floats(0, 0.1))
    def report(self, passed: float) -> None:
        self.clock.now += passed
        self.loads.take(NothingReported())

    @invariant()
    def agrees(self) -> None:
        self.loads.check()
        assert self.loads.in_flight == len(self.sent)
        assert _now(self.loads, "prefill_tokens") <= sum(request.prefill_tokens for request in self.waiting)
        for chain in _CHAINS:
            coming = {page for request in self.waiting for page in request.pages}
            expected = next((depth for depth, page in enumerate(chain) if page not in coming), len(chain))
            assert self.loads.coming_pages(chain) == expected


TestLoads = LoadMachine.TestCase
TestLoads.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
