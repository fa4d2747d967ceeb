from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.router.policy import POLICIES, Choice, choose, policy
from jkv.router.score import EngineScore, Scores, score
from tests.router.candidates import SPEEDS, Engine, candidates, expected

_PAGE = 64
_MIB = 2**20


def _scores(engines: list[Engine], prompt_tokens: int) -> Scores:
    return score(candidates(engines), prompt_tokens, _PAGE)


def _one(engine: Engine, prompt_tokens: int) -> EngineScore:
    return _scores([engine], prompt_tokens).one(0)


def _choose(engines: list[Engine], prompt_tokens: int, name: str = "cache-aware") -> Choice:
    return choose(policy(name, seed=0), candidates(engines), prompt_tokens, _PAGE)


def test_each_tier_costs_its_bytes_over_its_measured_speed() -> None:
    found = _one(Engine("a", l1=10, l2=5, l3=1), 20 * _PAGE)
    assert (found.l1_tokens, found.l2_tokens, found.l3_tokens) == (640, 320, 64)
    assert found.load_s == pytest.approx(5 / 1000 + 1 / 100)
    assert found.prefill_s == pytest.approx(4 * _PAGE / 1000)
    assert found.queue_s == 0
    assert found.ttft_s == found.load_s + found.prefill_s


def test_small_parts_are_not_rounded_away() -> None:
    found = _one(Engine("a", prefill_tokens=1), 1)
    assert found.queue_s == pytest.approx(0.001)
    assert found.prefill_s == pytest.approx(0.001)
    assert _one(Engine("a", l2=1), _PAGE + 1).load_s == pytest.approx(0.001)


def test_the_last_token_is_always_computed() -> None:
    found = _one(Engine("a", l1=3, l2=1), 4 * _PAGE)
    assert (found.l1_tokens, found.l2_tokens) == (3 * _PAGE, _PAGE - 1)
    assert found.prefill_s == pytest.approx(0.001)


def test_a_speed_that_is_not_believed_yet_is_that_of_the_others() -> None:
    def named(name: str, speed: float, believed: float) -> Engine:
        return Engine(name, reported_tokens_per_s=speed, prefill_tokens_per_s=believed)

    engines = [named("doubtful", 10.0, 0.0), named("fast", 2000.0, 1800.0), named("slow", 500.0, 600.0)]
    assert _scores(engines, 100).token_s.tolist() == [1 / 600, 1 / 1800, 1 / 600]
    # Where nobody is believed, the typical one of what was said counts for all.
    alone = [engine._replace(prefill_tokens_per_s=0.0) for engine in engines]
    assert _scores(alone, 100).token_s.tolist() == 3 * [1 / 500]


def test_loads_that_are_slower_than_computing_cost_what_computing_does() -> None:
    slow = Engine("a", l3=10, l3_bytes_per_s=1.0 * _MIB)  # a second a page; computing takes 0.064
    assert _one(slow, 640 + 1).load_s == pytest.approx(0.64)


def test_pages_that_prompts_before_it_will_leave_count_as_cached() -> None:
    found = _one(Engine("a", l1=2, l2=1, coming=8, prefill_tokens=400), 10 * _PAGE)
    assert (found.l1_tokens, found.l2_tokens, found.cached_tokens) == (7 * _PAGE, _PAGE, 8 * _PAGE)
    assert found.queue_s == pytest.approx(0.4)
    fewer = _one(Engine("a", l1=2, l2=1, coming=1), 10 * _PAGE)
    assert fewer.cached_tokens == 3 * _PAGE


def test_31_of_32_pages_beat_none_and_give_way_to_a_queue() -> None:
    prompt = 32 * _PAGE
    assert _choose([Engine("cold"), Engine("warm", l1=31)], prompt).score.id == "warm"
    busy = Engine("warm", l1=31, prefill_tokens=7000, requests=3)
    assert _choose([Engine("cold"), busy], prompt).score.id == "cold"
    waits = Engine("warm", l1=31, prefill_tokens=1500, requests=1)
    assert _choose([Engine("cold"), waits], prompt).score.id == "warm"


@pytest.mark.parametrize("fewer", [31, 30])
def test_near_ties_go_to_the_least_loaded(fewer: int) -> None:
    whole = Engine("whole", l1=32, requests=2, running=2)
    choice = _choose([whole, Engine("near", l1=fewer)], 33 * _PAGE)
    assert choice.score.id == "near"
    assert choice.why == "the least loaded of 2 whose expected times are near"
    assert _choose([whole, Engine("far", l1=29)], 33 * _PAGE).score.id == "whole"


def test_a_prefix_is_computed_again_sooner_where_nobody_waits_for_that() -> None:
    warm = Engine("warm", l1=31, prefill_tokens=9500, requests=4)
    assert _choose([warm, Engine("idle")], 32 * _PAGE).score.id == "idle"
    busy = Engine("busy", prefill_tokens=3000, requests=3)
    assert _one(busy, 32 * _PAGE).ttft_s < _one(warm, 32 * _PAGE).ttft_s
    assert _choose([warm, busy], 32 * _PAGE).score.id == "warm"


def test_work_costs_those_that_come_after_where_engines_are_always_busy() -> None:
    warm = Engine("warm", l1=31, prefill_tokens=7000, requests=3)
    assert _choose([warm, Engine("cold")], 32 * _PAGE).score.id == "cold"
    assert _choose([warm, Engine("cold", busy=0.8)], 32 * _PAGE).score.id == "warm"
    assert _scores([Engine("full", busy=1.0)], 64).behind[0] == pytest.approx(2 + 0.9 / 0.1)


def test_measurements_that_differ_a_little_do_not_draw_all_requests_to_oneEngine() -> None:
    speeds = [900.0, 1000.0, 1100.0, 1300.0]
    turns = [0, 0, 0, 0]
    chosen = [0, 0, 0, 0]
    for turn in range(1, 401):
        engines = [
            Engine(str(i), prefill_tokens_per_s=speed, chosen_at=turns[i]) for i, speed in enumerate(speeds)
        ]
        choice = _choose(engines, 4000)
        turns[choice.chosen] = turn
        chosen[choice.chosen] += 1
    assert chosen == [100, 100, 100, 100]


def test_a_much_faster_engine_is_preferred_until_its_queue_is_longer() -> None:
    fast = Engine("fast", prefill_tokens_per_s=4000.0, prefill_tokens=8000)
    engines = [Engine("slow"), Engine("slow too"), fast]
    assert _choose(engines, 4000).score.id == "fast"  # 2 s and 1 s against 4 s
    engines[2] = fast._replace(prefill_tokens=40_000)
    assert _choose(engines, 4000).score.id == "slow"


def test_what_is_not_measured_is_taken_from_the_others() -> None:
    unknown = dict.fromkeys(SPEEDS, 0.0)
    new = Engine("new", l2=4, l3=4)._replace(**unknown)
    known = Engine("known", l2=4, l3=4)
    scores = _scores([new, known], 20 * _PAGE)
    assert scores.one(0) == scores.one(1)._replace(id="new")
    alone = _one(new, 20 * _PAGE)  # nothing is measured anywhere
    assert 0 < alone.load_s < alone.prefill_s


def test_an_engine_without_a_free_slot_is_waited_for() -> None:
    full = Engine("full", l1=10, requests=9, slot_s=4.0)
    assert _one(full, 11 * _PAGE).queue_s == pytest.approx(2 * 4.0 / 8)
    assert _one(full._replace(requests=7), 11 * _PAGE).queue_s == 0
    assert _choose([full._replace(slot_s=20.0), Engine("free")], 11 * _PAGE).score.id == "free"
    # The time that a slot is kept is taken from engines that know it.
    scores = _scores([full._replace(slot_s=0.0), Engine("b", slot_s=8.0)], 64)
    assert scores.queue_s[0] == pytest.approx(2 * 8.0 / 8)


def test_a_burst_is_spread_although_nothing_is_reported_in_between() -> None:
    waiting = [0, 0, 0, 0]
    for _ in range(64):
        engines = [
            Engine(str(i), l1=90 if i == 0 else 0, prefill_tokens=tokens) for i, tokens in enumerate(waiting)
        ]
        chosen = _choose(engines, 100 * _PAGE)
        waiting[chosen.chosen] += 100 * _PAGE - chosen.score.cached_tokens
    assert max(waiting) < 2 * min(waiting)
    assert waiting[0] > 0


def test_the_other_policies_ignore_the_cache() -> None:
    engines = [
        Engine("a", l1=30, prefill_tokens=10, requests=1, chosen_at=5),
        Engine("b", prefill_tokens=1, requests=4, chosen_at=9),
        Engine("c", prefill_tokens=500, requests=0, chosen_at=2),
    ]
    assert _choose(engines, 32 * _PAGE).score.id == "a"
    assert _choose(engines, 32 * _PAGE, "least-loaded").score.id == "b"
    assert _choose(engines, 32 * _PAGE, "round-robin").score.id == "c"
    rng = policy("random", seed=1)
    assert {choose(rng, candidates(engines), 2048, _PAGE).score.id for _ in range(50)} == {"a", "b", "c"}


_engines = st.lists(
    st.builds(
        Engine,
        st.text(max_size=3),
        l1=st.integers(0, 50),
        l2=st.integers(0, 50),
        l3=st.integers(0, 50),
        coming=st.integers(0, 200),
        requests=st.integers(0, 20),
        running=st.integers(0, 20),
        prefill_tokens=st.integers(0, 10**6),
        slots=st.integers(0, 16),
        page_bytes=st.integers(1, 2**24),
        chosen_at=st.integers(0, 10),
        busy=st.floats(0, 1),
        slot_s=st.floats(0, 100),
        **{speed: st.just(0.0) | st.floats(1, 1e6) for speed in SPEEDS},
    ),
    min_size=1,
    max_size=5,
)


@given(_engines, st.integers(1, 5000))
def test_all_engines_at_once_are_scored_as_each_alone(engines: list[Engine], prompt: int) -> None:
    scores = _scores(engines, prompt)
    for number, engine in enumerate(engines):
        one = expected(engine, engines, prompt, _PAGE)
        assert scores.cached[:, number].tolist() == one.cached
        for field in ("queue_s", "load_s", "prefill_s", "token_s", "behind"):
            assert getattr(scores, field)[number] == pytest.approx(getattr(one, field), rel=1e-12)


@given(_engines, st.integers(1, 5000), st.sampled_from(POLICIES))
def test_scores_add_up_and_somebody_is_chosen(engines: list[Engine], prompt: int, name: str) -> None:
    choice = _choose(engines, prompt, name)
    scores = [choice.scores.one(number) for number in range(len(engines))]
    assert [one.id for one in scores] == [engine.id for engine in engines]
    assert choice.score == scores[choice.chosen]
    for one in scores:
        assert 0 <= one.cached_tokens < prompt
        assert min(one.l1_tokens, one.l2_tokens, one.l3_tokens, one.queue_s, one.load_s) >= 0
        assert one.prefill_s > 0
    if name == "cache-aware":
        costs, work = choice.scores.cost_s, (1 + choice.scores.behind) * choice.scores.token_s
        near = [number for number, cost in enumerate(costs) if cost <= costs.min() + 2 * _PAGE * work.min()]
        busy = [(scores[i].queue_s, engines[i].requests, engines[i].chosen_at, i) for i in near]
        assert choice.chosen == min(busy)[-1]
