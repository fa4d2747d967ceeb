"""The contract: the same tokens and log-probabilities cold and from every tier; counters tell which."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jkv.cache.pages import Tier
from jkv.engine.request import CachedByTier, EngineRequest, FinishReason
from jkv.errors import InvalidRequestError
from tests.engine.conftest import ALL_TIERS, L1_TOKENS, Tiny
from tests.engine.harness import Bench, Outcome, build, random_prompt, request, tiny_checkpoint
from tests.engine.oracle import check_hit, tiny_case
from tests.engine.test_bit_equal import bits, cold_bits, varied
from tests.engine.test_loop import fail_once

MODELS: list[Any] = [("llama_mha_tied", 8), ("llama3", 16), ("mistral_window", 64)]
LATER = [(name, page) for name in ("gemma2", "gemma3", "qwen3_moe") for page in (8, 16, 64)]
# What to flush so that the next request finds its pages in this tier, and not above it.
ABOVE: dict[Tier, tuple[Tier, ...]] = {Tier.L1: (), Tier.L2: (Tier.L1,), Tier.L3: (Tier.L1, Tier.L2)}


def models(*later: tuple[str, int]) -> pytest.MarkDecorator:
    """Page sizes 8, 16 and 64, and of the later models those given; the others in long runs."""
    rest = [pytest.param(*m, marks=pytest.mark.full) for m in LATER if m not in later]
    return pytest.mark.parametrize(("name", "page_size"), [*MODELS, *later, *rest])


on_every_page_size = models(("qwen3_moe", 16))


@pytest.fixture
def bench(tiny: Tiny, name: str, page_size: int) -> Bench:
    return tiny(name, page_size, tiers=True, batch_invariant=True)


@pytest.fixture
def one_bench(tiny: Tiny) -> Bench:
    """Where one page size is enough."""
    return tiny("llama3", 16, tiers=True, batch_invariant=True)


def only(tier: Tier, tokens: int) -> CachedByTier:
    return CachedByTier(**{tier.value: tokens})


def from_tier(bench: Bench, tier: Tier, r: EngineRequest) -> Outcome:
    """Runs a request whose pages are cached, with all tiers above this one empty; it alone must serve."""
    pages = len(r.prompt_ids) // bench.page_size
    bench.ask(bench.engine.cache.drain_writes())
    bench.flush(*ABOVE[tier])
    before = {t: bench.stats(t) for t in Tier}
    outcome = bench.one(r)
    after = {t: bench.stats(t) for t in Tier}
    assert outcome.by_tier == only(tier, bench.matched_tokens(r) if pages else 0)
    for t in Tier:
        assert after[t].hits - before[t].hits == (pages if t is tier else 0)
        assert after[t].misses - before[t].misses == (pages if t in ABOVE[tier] else 0)
        assert after[t].hit_tokens - before[t].hit_tokens == outcome.cached * (t is tier)
        assert after[t].loads - before[t].loads == (pages if t is tier is not Tier.L1 else 0)
    return outcome


@on_every_page_size
def test_a_hit_in_each_tier_at_every_page_boundary(bench: Bench) -> None:
    page = bench.page_size
    for number, length in enumerate(
        (page - 1, page, page + 1, 2 * page - 1, 2 * page, 3 * page, 3 * page + 1)
    ):
        r = varied(number, random_prompt(length, length))
        cold = bench.cold(r)
        assert bench.one(r).bits == cold.bits
        for tier in Tier:
            assert from_tier(bench, tier, r).bits == cold.bits, f"length {length} from {tier}"


@models()
def test_prompts_come_back_after_a_restart(tmp_path: Path, name: str, page_size: int) -> None:
    flags = {**ALL_TIERS, "l3_dir": str(tmp_path), "batch_invariant": True}
    lengths = (page_size - 1, page_size, page_size + 1, 4 * page_size, 4 * page_size + 5)
    requests = [varied(i, random_prompt(100 + i, length)) for i, length in enumerate(lengths)]
    expected: list[object] = []
    for run in range(2):
        bench = build(tiny_checkpoint(name), page_size=page_size, l1_tokens=L1_TOKENS, **flags)
        if not run:
            expected = cold_bits(bench, requests)
            bench.run(*requests)
        else:
            outcomes = [bench.one(r) for r in requests]
            assert bits(outcomes) == expected
            assert [o.by_tier for o in outcomes] == [
                only(Tier.L3, bench.matched_tokens(r) if len(r.prompt_ids) >= page_size else 0)
                for r in requests
            ]
        bench.stop()
        assert not bench.violations


@models()
def test_default_mode_differs_at_close_calls_only(tiny: Tiny, name: str, page_size: int) -> None:
    bench = tiny(name, page_size, tiers=True)
    for number in range(3):
        case = tiny_case(name, number)
        r = request(case.prompt_ids, len(case.greedy_ids))
        cold = bench.cold(r)
        case.check_tokens(cold)
        bench.one(r)
        for tier in Tier:
            hit = from_tier(bench, tier, r)
            case.check_tokens(hit)
            check_hit(cold, hit, case)


@on_every_page_size
def test_one_batch_of_hits_in_every_tier_and_of_misses(bench: Bench) -> None:
    page = bench.page_size
    requests = [varied(i, random_prompt(10 + i, (1 + i % 3) * page + i % 5)) for i in range(12)]
    expected = cold_bits(bench, requests)
    bench.run(*requests[0::4])
    bench.flush(Tier.L1, Tier.L2)
    bench.run(*requests[1::4])
    bench.flush(Tier.L1)
    bench.run(*requests[2::4])
    outcomes = bench.run(*requests)
    assert bits(outcomes) == expected
    tiers = (Tier.L3, Tier.L2, Tier.L1, None)
    for i, outcome in enumerate(outcomes):
        tier = tiers[i % 4]
        tokens = bench.matched_tokens(requests[i])
        assert outcome.by_tier == (only(tier, tokens) if tier else CachedByTier()), f"request {i}"


@on_every_page_size
def test_one_prompt_out_of_three_tiers(bench: Bench) -> None:
    page = bench.page_size
    prompt = random_prompt(1, 6 * page + 1)
    whole = varied(0, prompt)
    cold = bench.cold(whole)
    bench.one(whole)
    bench.flush(Tier.L1, Tier.L2)
    bench.one(request(prompt[: 4 * page], 1))
    bench.flush(Tier.L1)
    bench.one(request(prompt[: 2 * page], 1))
    hit = bench.one(whole)
    assert hit.by_tier == CachedByTier(l1=2 * page, l2=2 * page, l3=2 * page)
    assert hit.bits == cold.bits


def test_the_next_turn_finds_what_decoding_filled_in_every_tier(one_bench: Bench) -> None:
    page = one_bench.page_size
    first = varied(0, random_prompt(2, page + 2), 2 * page)
    answer = one_bench.one(first).tokens
    second = varied(1, [*first.prompt_ids, *answer, *random_prompt(3, 5)], 1)
    cold = one_bench.cold(second)
    for tier in (Tier.L2, Tier.L3):
        one_bench.ask(one_bench.engine.cache.drain_writes())
        one_bench.flush(*ABOVE[tier])
        hit = one_bench.one(second)
        assert hit.by_tier == only(tier, 3 * page)
        assert hit.bits == cold.bits


def test_requests_that_come_while_their_pages_are_being_written(one_bench: Bench) -> None:
    bench, page = one_bench, one_bench.page_size
    requests = [varied(i, random_prompt(50 + i, 3 * page + i), 6) for i in range(4)]
    expected = cold_bits(bench, requests)
    bench.flush(*Tier)
    before = bench.stats(Tier.L3)
    with bench.disk_that_waits() as go_on:
        assert bits(bench.run(*requests)) == expected
        for tier in (Tier.L1, Tier.L2, Tier.L1):
            bench.flush(*([Tier.L1] if tier is Tier.L2 else []))
            outcomes = bench.run(*requests, *requests)
            assert bits(outcomes) == expected * 2
            # The second of two equal requests finds in L1 what the first has brought up.
            assert {t for o in outcomes for t in Tier if getattr(o.by_tier, t.value)} <= {tier, Tier.L1}
        assert bench.scheduler.lower.pending_writes == 12
        go_on.set()
    assert bench.stats(Tier.L3).stores - before.stores == 12, "a page was written twice"
    bench.flush(Tier.L1, Tier.L2)
    again = bench.run(*requests)
    assert bits(again) == expected
    assert [o.by_tier.l3 for o in again] == [bench.matched_tokens(r) for r in requests]


def test_32_conversations_keep_their_secrets(one_bench: Bench) -> None:
    """A page of the prompt that they share is in L1 once one of them has brought it up."""
    bench, page = one_bench, one_bench.page_size
    shared, new = 2 * page, 5
    histories = [[*random_prompt(7, shared), *random_prompt(1000 + i, page + i)] for i in range(32)]
    for round_, tier in enumerate((None, Tier.L2, Tier.L3, Tier.L2)):
        requests = [request(h, 6, temperature=0.9, seed=i) for i, h in enumerate(histories)]
        if tier is not None:
            bench.ask(bench.engine.cache.drain_writes())
            bench.flush(*ABOVE[tier])
        outcomes = bench.run(*requests)
        for history, outcome in zip(histories, outcomes, strict=True):
            if tier is not None:
                cached = (
                    (len(history) - new - 1) // page * page
                )  # all but the last sampled token was computed
                assert outcome.cached == cached
                assert getattr(outcome.by_tier, tier.value) >= cached - shared
                assert outcome.by_tier.l1 <= shared
        for i in (0, 13, 31):
            assert outcomes[i].bits == bench.cold(requests[i]).bits
        for i, outcome in enumerate(outcomes):
            histories[i] += [*outcome.tokens, *random_prompt(2000 + 100 * round_ + i, new)]


def test_salts_share_nothing_in_any_tier(one_bench: Bench) -> None:
    prompt = random_prompt(8, 70)
    mine = request(prompt, 6, salt="a")
    cold = one_bench.one(mine)
    for tier in Tier:
        one_bench.ask(one_bench.engine.cache.drain_writes())
        one_bench.flush(*ABOVE[tier])
        for salt in ("b", ""):
            other = one_bench.one(request(prompt, 6, salt=f"{salt}{tier}"))
            assert other.by_tier == CachedByTier()
            assert other.tokens == cold.tokens
        assert one_bench.one(mine).by_tier == only(tier, 64)


def test_no_cache_neither_reads_nor_fills_any_tier(one_bench: Bench) -> None:
    prompt, other = random_prompt(9, 70), random_prompt(10, 70)
    cold = one_bench.one(request(prompt, 6))
    one_bench.ask(one_bench.engine.cache.drain_writes())
    stored = one_bench.stats(Tier.L3).stores
    assert stored >= 4
    one_bench.one(request(other, 6, no_cache=True))
    one_bench.ask(one_bench.engine.cache.drain_writes())
    assert one_bench.stats(Tier.L3).stores == stored
    for tier in Tier:
        one_bench.flush(*ABOVE[tier])
        uncached = one_bench.one(request(prompt, 6, no_cache=True))
        assert uncached.by_tier == CachedByTier()
        assert uncached.bits == cold.bits
        assert one_bench.one(request(other, 6, no_cache=True)).by_tier == CachedByTier()
        assert one_bench.one(request(prompt, 6)).by_tier == only(tier, 64)
    assert one_bench.one(request(other, 1)).by_tier == CachedByTier()


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[Bench]:
    """An engine with L3 and without L2."""
    flags = {**ALL_TIERS, "l2_gib": 0, "l3_dir": str(tmp_path), "batch_invariant": True}
    bench = build(tiny_checkpoint("llama3"), page_size=16, l1_tokens=L1_TOKENS, **flags)
    yield bench
    bench.settle()
    bench.stop()


def test_l3_without_l2(staged: Bench) -> None:
    requests = [varied(i, random_prompt(20 + i, 60 + i)) for i in range(8)]
    expected = cold_bits(staged, requests)
    staged.run(*requests)
    staged.ask(staged.engine.cache.drain_writes())
    staged.flush(Tier.L1)
    outcomes = staged.run(*requests)
    assert bits(outcomes) == expected
    assert [o.by_tier for o in outcomes] == [only(Tier.L3, staged.matched_tokens(r)) for r in requests]
    with pytest.raises(InvalidRequestError, match="l2 is off"):
        staged.flush(Tier.L2)
    assert not staged.scheduler.lower.host.pages()


@pytest.mark.parametrize("reading", [False, True], ids=["dispatch", "read"])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_after_a_failed_step_lower_tiers_serve_what_they_had(
    one_bench: Bench, monkeypatch: pytest.MonkeyPatch, step: int, reading: bool
) -> None:
    bench = one_bench
    r = varied(0, random_prompt(1, 70))
    expected = bench.one(r)
    others = [request(random_prompt(i, 70), 12) for i in range(2, 8)]
    cold = cold_bits(bench, others)
    fail_once(bench, monkeypatch, step=step, reading=reading)
    outcomes = bench.run(r, *others)
    assert {o.finish_reason for o in outcomes} == {FinishReason.ERROR}
    monkeypatch.undo()
    again = bench.one(r)
    assert again.by_tier == only(Tier.L2, 64)
    assert again.bits == expected.bits
    assert bits(bench.run(*others)) == cold
    bench.ask(bench.engine.cache.drain_writes())
    bench.flush(Tier.L1, Tier.L2)
    assert bench.one(r).by_tier == only(Tier.L3, 64)
    assert bits(bench.run(*others)) == cold


def test_500_cancelled_requests_leave_every_tier_usable(one_bench: Bench) -> None:
    bench = one_bench
    r = varied(0, random_prompt(30, 200), 4)
    expected = bench.one(r).bits
    bench.ask(bench.engine.cache.drain_writes())

    async def come_and_go(number: int) -> None:
        reader = asyncio.create_task(bench.collect(r))
        await asyncio.sleep((number % 10) * 0.0005)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        if number % 3 == 0:
            await bench.engine.cache.flush([Tier.L1, Tier.L2])

    async def all_of_them() -> None:
        for start in range(0, 500, 10):
            await asyncio.gather(*(come_and_go(start + i) for i in range(10)))

    asyncio.run(all_of_them())
    bench.ask(bench.engine.cache.drain_writes())
    assert from_tier(bench, Tier.L3, r).bits == expected
    assert bench.stats(Tier.L3).errors == {}
