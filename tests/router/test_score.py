from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.router.index import Match
from jkv.router.load import NothingReported
from jkv.router.policy import POLICIES, Choice, choose, policy
from jkv.router.score import Candidate, EngineScore, score

_PAGE = 64
_MIB = 2**20
_REPORT = NothingReported(
    max_num_seqs=8, prefill_tokens_per_s=1000.0, l2_bytes_per_s=1000.0 * _MIB, l3_bytes_per_s=100.0 * _MIB
)


def _engine(name: str, match: Match = Match(), **fields: Any) -> Candidate:  # noqa: B008
    known: dict[str, Any] = {
        "report": _REPORT,
        "requests": 0,
        "prefill_tokens": 0,
        "slot_s": 0.0,
        "chosen_at": 0,
        "page_bytes": _MIB,
    }
    known |= fields
    known.setdefault("prefill_tokens_per_s", known["report"].prefill_tokens_per_s)
    return Candidate(id=name, match=match, **known)


def _one(engine: Candidate, prompt_tokens: int) -> EngineScore:
    return score([engine], prompt_tokens, _PAGE)[0]


def _choose(candidates: list[Candidate], prompt_tokens: int, name: str = "cache-aware") -> Choice:
    return choose(policy(name, seed=0), candidates, prompt_tokens, _PAGE)


def test_each_tier_costs_its_bytes_over_its_measured_speed() -> None:
    found = _one(_engine("a", Match(l1=10, l2=5, l3=1)), 20 * _PAGE)
    assert (found.l1_tokens, found.l2_tokens, found.l3_tokens) == (640, 320, 64)
    assert found.load_s == pytest.approx(5 / 1000 + 1 / 100)
    assert found.prefill_s == pytest.approx(4 * _PAGE / 1000)
    assert found.queue_s == 0
    assert found.ttft_s == found.load_s + found.prefill_s


def test_small_parts_are_not_rounded_away() -> None:
    found = _one(_engine("a", prefill_tokens=1), 1)
    assert found.queue_s == pytest.approx(0.001)
    assert found.prefill_s == pytest.approx(0.001)
    assert _one(_engine("a", Match(l2=1)), _PAGE + 1).load_s == pytest.approx(0.001)


def test_the_last_token_is_always_computed() -> None:
    found = _one(_engine("a", Match(l1=3, l2=1)), 4 * _PAGE)
    assert (found.l1_tokens, found.l2_tokens) == (3 * _PAGE, _PAGE - 1)
    assert found.prefill_s == pytest.approx(0.001)


def test_a_speed_that_is_not_believed_yet_is_that_of_the_others() -> None:
    def named(name: str, speed: float, believed: float) -> Candidate:
        report = replace(_REPORT, prefill_tokens_per_s=speed)
        return _engine(name, report=report, prefill_tokens_per_s=believed)

    engines = [named("doubtful", 10.0, 0.0), named("fast", 2000.0, 1800.0), named("slow", 500.0, 600.0)]
    assert [one.token_s for one in score(engines, 100, _PAGE)] == [1 / 600, 1 / 1800, 1 / 600]
    # Where nobody is believed, the typical one of what was said counts for all.
    alone = [engine._replace(prefill_tokens_per_s=0.0) for engine in engines]
    assert {one.token_s for one in score(alone, 100, _PAGE)} == {1 / 500}


def test_loads_that_are_slower_than_computing_cost_what_computing_does() -> None:
    slow = replace(_REPORT, l3_bytes_per_s=1.0 * _MIB)  # a second a page; computing takes 0.064
    assert _one(_engine("a", Match(l3=10), report=slow), 640 + 1).load_s == pytest.approx(0.64)


def test_pages_that_prompts_before_it_will_leave_count_as_cached() -> None:
    found = _one(_engine("a", Match(l1=2, l2=1), coming_pages=8, prefill_tokens=400), 10 * _PAGE)
    assert (found.l1_tokens, found.l2_tokens, found.cached_tokens) == (7 * _PAGE, _PAGE, 8 * _PAGE)
    assert found.queue_s == pytest.approx(0.4)
    fewer = _one(_engine("a", Match(l1=2, l2=1), coming_pages=1), 10 * _PAGE)
    assert fewer.cached_tokens == 3 * _PAGE


def test_31_of_32_pages_beat_none_and_give_way_to_a_queue() -> None:
    prompt = 32 * _PAGE
    assert _choose([_engine("cold"), _engine("warm", Match(l1=31))], prompt).score.id == "warm"
    busy = _engine("warm", Match(l1=31), prefill_tokens=7000, requests=3)
    assert _choose([_engine("cold"), busy], prompt).score.id == "cold"
    waits = _engine("warm", Match(l1=31), prefill_tokens=1500, requests=1)
    assert _choose([_engine("cold"), waits], prompt).score.id == "warm"


@pytest.mark.parametrize("fewer", [31, 30])
def test_near_ties_go_to_the_least_loaded(fewer: int) -> None:
    two = replace(_REPORT, running=2)
    whole = _engine("whole", Match(l1=32), requests=2, report=two)
    choice = _choose([whole, _engine("near", Match(l1=fewer))], 33 * _PAGE)
    assert choice.score.id == "near"
    assert choice.why == "the least loaded of 2 whose expected times are near"
    assert _choose([whole, _engine("far", Match(l1=29))], 33 * _PAGE).score.id == "whole"


def test_a_prefix_is_computed_again_sooner_where_nobody_waits_for_that() -> None:
    warm = _engine("warm", Match(l1=31), prefill_tokens=9500, requests=4)
    assert _choose([warm, _engine("idle")], 32 * _PAGE).score.id == "idle"
    busy = _engine("busy", prefill_tokens=3000, requests=3)
    assert _one(busy, 32 * _PAGE).ttft_s < _one(warm, 32 * _PAGE).ttft_s
    assert _choose([warm, busy], 32 * _PAGE).score.id == "warm"


def test_work_costs_those_that_come_after_where_engines_are_always_busy() -> None:
    warm = _engine("warm", Match(l1=31), prefill_tokens=7000, requests=3)
    assert _choose([warm, _engine("cold")], 32 * _PAGE).score.id == "cold"
    assert _choose([warm, _engine("cold", busy=0.8)], 32 * _PAGE).score.id == "warm"
    assert _one(_engine("full", busy=1.0), 64).behind == pytest.approx(2 + 0.9 / 0.1)


def test_measurements_that_differ_a_little_do_not_draw_all_requests_to_one_engine() -> None:
    speeds = [900.0, 1000.0, 1100.0, 1300.0]
    turns = [0, 0, 0, 0]
    chosen = [0, 0, 0, 0]
    for turn in range(1, 401):
        engines = [
            _engine(str(i), report=replace(_REPORT, prefill_tokens_per_s=speed), chosen_at=turns[i])
            for i, speed in enumerate(speeds)
        ]
        choice = _choose(engines, 4000)
        turns[choice.chosen] = turn
        chosen[choice.chosen] += 1
    assert chosen == [100, 100, 100, 100]


def test_a_much_faster_engine_is_preferred_until_its_queue_is_longer() -> None:
    fast = replace(_REPORT, prefill_tokens_per_s=4000.0)
    engines = [_engine("slow"), _engine("slow too"), _engine("fast", report=fast, prefill_tokens=8000)]
    assert _choose(engines, 4000).score.id == "fast"  # 2 s and 1 s against 4 s
    engines[2] = engines[2]._replace(prefill_tokens=40_000)
    assert _choose(engines, 4000).score.id == "slow"


def test_what_is_not_measured_is_taken_from_the_others() -> None:
    new = _engine("new", Match(l2=4, l3=4), report=NothingReported(max_num_seqs=8))
    known = _engine("known", Match(l2=4, l3=4))
    scores = score([new, known], 20 * _PAGE, _PAGE)
    assert scores[0] == scores[1]._replace(id="new")
    alone = _one(new, 20 * _PAGE)  # nothing is measured anywhere
    assert 0 < alone.load_s < alone.prefill_s


def test_an_engine_without_a_free_slot_is_waited_for() -> None:
    full = _engine("full", Match(l1=10), requests=9, slot_s=4.0)
    assert _one(full, 11 * _PAGE).queue_s == pytest.approx(2 * 4.0 / 8)
    assert _one(full._replace(requests=7), 11 * _PAGE).queue_s == 0
    assert _choose([full._replace(slot_s=20.0), _engine("free")], 11 * _PAGE).score.id == "free"
    # The time that a slot is kept is taken from engines that know it.
    scores = score([full._replace(slot_s=0.0), _engine("b", slot_s=8.0)], 64, _PAGE)
    assert scores[0].queue_s == pytest.approx(2 * 8.0 / 8)


def test_a_burst_is_spread_although_nothing_is_reported_in_between() -> None:
    waiting = [0, 0, 0, 0]
    for _ in range(64):
        engines = [
            _engine(str(i), Match(l1=90 if i == 0 else 0), prefill_tokens=tokens)
            for i, tokens in enumerate(waiting)
        ]
        chosen = _choose(engines, 100 * _PAGE)
        waiting[chosen.chosen] += 100 * _PAGE - chosen.score.cached_tokens
    assert max(waiting) < 2 * min(waiting)
    assert waiting[0] > 0


def test_the_other_policies_ignore_the_cache() -> None:
    engines = [
        _engine("a", Match(l1=30), prefill_tokens=10, requests=1, chosen_at=5),
        _engine("b", prefill_tokens=1, requests=4, chosen_at=9),
        _engine("c", prefill_tokens=500, requests=0, chosen_at=2),
    ]
    assert _choose(engines, 32 * _PAGE).score.id == "a"
    assert _choose(engines, 32 * _PAGE, "least-loaded").score.id == "b"
    assert _choose(engines, 32 * _PAGE, "round-robin").score.id == "c"
    rng = policy("random", seed=1)
    assert {choose(rng, engines, 2048, _PAGE).score.id for _ in range(50)} == {"a", "b", "c"}


@given(
    st.lists(
        st.builds(
            _engine,
            st.text(max_size=3),
            st.builds(Match, l1=st.integers(0, 50), l2=st.integers(0, 50), l3=st.integers(0, 50)),
            requests=st.integers(0, 20),
            prefill_tokens=st.integers(0, 10**6),
            slot_s=st.floats(0, 100),
            coming_pages=st.integers(0, 200),
            report=st.builds(
                NothingReported,
                max_num_seqs=st.integers(0, 16),
                prefill_tokens_per_s=st.floats(0, 1e6),
                l2_bytes_per_s=st.floats(0, 1e11),
                l3_bytes_per_s=st.floats(0, 1e11),
            ),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 5000),
    st.sampled_from(POLICIES),
)
def test_scores_add_up_and_somebody_is_chosen(engines: list[Candidate], prompt: int, name: str) -> None:
    choice = _choose(engines, prompt, name)
    assert [one.id for one in choice.scores] == [engine.id for engine in engines]
    assert choice.score in choice.scores
    for one in choice.scores:
        assert 0 <= one.cached_tokens < prompt
        assert min(one.l1_tokens, one.l2_tokens, one.l3_tokens, one.queue_s, one.load_s) >= 0
        assert one.prefill_s > 0
    if name == "cache-aware":
        near_s = 2 * _PAGE * max((1 + one.behind) * one.token_s for one in choice.scores)
        assert choice.score.cost_s <= min(one.cost_s for one in choice.scores) + near_s
