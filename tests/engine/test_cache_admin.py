"""What operators ask of the cache: effects and counts, on an idle engine and beside running streams."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from jkv.cache.control import Prefix
from jkv.cache.pages import Tier
from jkv.engine.cache_control import EngineCache
from jkv.engine.request import CachedByTier
from jkv.errors import FailedPreconditionError, ShuttingDownError
from tests.engine.conftest import ALL_TIERS, L1_TOKENS, Tiny
from tests.engine.harness import Bench, build, random_prompt, request, tiny_checkpoint

PROMPT = random_prompt(1, 70)  # 4 full pages of 16 tokens, and 6 more tokens
PAGES, FULL = 4, 64
STREAMS = [request(random_prompt(700 + i, 20), 900, salt=f"stream {i}", logprobs=False) for i in range(3)]

Scenario = Callable[[EngineCache], Awaitable[None]]


@pytest.fixture
def bench(tiny: Tiny) -> Bench:
    return tiny("llama3", 16, tiers=True, batch_invariant=True)


@pytest.fixture(scope="module")
def quiet(shared_engines: Tiny) -> list[tuple[int, ...]]:
    """The streams' tokens when nothing else happens."""
    bench = shared_engines("llama3", 16, tiers=True, batch_invariant=True)
    tokens = [o.tokens for o in bench.run(*STREAMS)]
    bench.settle()
    return tokens


@pytest.fixture(params=[False, True], ids=["idle", "busy"])
def play(
    request: pytest.FixtureRequest, bench: Bench, quiet: list[tuple[int, ...]]
) -> Callable[[Scenario], None]:
    """Caches PROMPT in all tiers and runs a scenario, also beside three streams, which must not notice."""

    async def on_idle(scenario: Scenario) -> None:
        await bench.collect(one_token())
        await bench.engine.cache.drain_writes()
        await scenario(bench.engine.cache)

    async def on_busy(scenario: Scenario) -> None:
        got: list[list[int]] = [[] for _ in STREAMS]

        async def read(number: int) -> None:
            async for output in bench.stream(STREAMS[number]):
                got[number] += output.token_ids

        tasks = [asyncio.create_task(read(i)) for i in range(len(STREAMS))]
        while not all(got):
            await asyncio.sleep(0.001)
        try:
            await on_idle(scenario)
            assert not any(task.done() for task in tasks), "the streams were too short for this"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert all(tuple(t) == q[: len(t)] for t, q in zip(got, quiet, strict=True)), "a stream was disturbed"

    return lambda scenario: asyncio.run((on_busy if request.param else on_idle)(scenario))


def one_token(prompt: Sequence[int] = PROMPT, salt: str = "") -> Any:
    return request(prompt, 1, salt=salt)


def prefix(prompt: Sequence[int] = PROMPT, salt: str = "") -> Prefix:
    return Prefix(token_ids=prompt, cache_salt=salt)


def only(tier: Tier, tokens: int = FULL) -> dict[Tier, int]:
    return {**dict.fromkeys(Tier, 0), tier: tokens}


async def by_tier(bench: Bench, prompt: Sequence[int] = PROMPT, salt: str = "") -> CachedByTier:
    return (await bench.collect(one_token(prompt, salt))).by_tier


def test_lookup_tells_the_nearest_tier_and_changes_nothing(play: Any) -> None:
    async def scenario(cache: EngineCache) -> None:
        assert await cache.lookup(prefix()) == only(Tier.L1)
        assert await cache.lookup(prefix(PROMPT[:64])) == only(Tier.L1, 63), "the last token is computed"
        assert await cache.lookup(prefix(salt="other")) == dict.fromkeys(Tier, 0)
        await cache.flush([Tier.L1])
        assert await cache.lookup(prefix()) == only(Tier.L2)
        await cache.flush([Tier.L2])
        for _ in range(2):
            assert await cache.lookup(prefix()) == only(Tier.L3)
        assert (await cache.cache_stats()).tiers[Tier.L2].loads == before

    before = 0

    async def count(cache: EngineCache) -> None:
        nonlocal before
        before = (await cache.cache_stats()).tiers[Tier.L2].loads
        await scenario(cache)

    play(count)


def test_flush_drops_these_tiers_only(play: Any, bench: Bench) -> None:
    async def scenario(cache: EngineCache) -> None:
        flushed = await cache.flush([Tier.L2])
        assert flushed.keys() == {Tier.L2}
        assert flushed[Tier.L2] >= PAGES
        assert await by_tier(bench) == CachedByTier(l1=FULL)
        assert (await cache.flush([Tier.L1]))[Tier.L1] >= PAGES
        assert await by_tier(bench) == CachedByTier(l3=FULL)
        flushed = await cache.flush([Tier.L3, Tier.L1])
        assert all(count >= PAGES for count in flushed.values())
        assert await by_tier(bench) == CachedByTier(l2=FULL)
        await cache.flush(list(Tier))
        assert await by_tier(bench) == CachedByTier()

    play(scenario)


def test_demote_moves_a_tier_down_and_loses_nothing(play: Any, bench: Bench) -> None:
    async def scenario(cache: EngineCache) -> None:
        assert await cache.demote(Tier.L1) >= PAGES
        assert await by_tier(bench) == CachedByTier(l2=FULL)
        await cache.flush([Tier.L3])  # L2 alone has it now
        await cache.demote(Tier.L1)
        assert await cache.demote(Tier.L2) >= PAGES
        assert await by_tier(bench) == CachedByTier(l3=FULL)

    play(scenario)


@pytest.mark.parametrize("tier", [Tier.L1, Tier.L2])
def test_prefetch_brings_a_prefix_up(play: Any, bench: Bench, tier: Tier) -> None:
    async def scenario(cache: EngineCache) -> None:
        assert await cache.prefetch(prefix(), tier) == FULL
        await cache.flush([Tier.L1, Tier.L2])
        assert await cache.prefetch(prefix(salt="other"), tier) == 0
        longer = [*PROMPT[:64], *random_prompt(2, 40)]
        assert await cache.prefetch(prefix(longer), tier) == FULL
        assert await cache.lookup(prefix()) == only(tier)
        assert await by_tier(bench) == CachedByTier(**{tier.value: FULL})

    play(scenario)


def test_evict_takes_the_pages_that_nothing_else_continues(play: Any, bench: Bench) -> None:
    async def scenario(cache: EngineCache) -> None:
        other = [*PROMPT[:32], *random_prompt(3, 38)]
        await bench.collect(one_token(other))
        assert await cache.evict(prefix(), None) == 2
        assert await by_tier(bench, other) == CachedByTier(l1=FULL)
        assert await cache.lookup(prefix()) == only(Tier.L1, 32)
        assert await cache.evict(prefix(other), None) == PAGES
        assert await cache.lookup(prefix(other)) == dict.fromkeys(Tier, 0)
        assert await cache.evict(prefix(other), None) == 0

    play(scenario)


def test_evict_takes_a_salt_out_of_every_tier(play: Any, bench: Bench) -> None:
    async def scenario(cache: EngineCache) -> None:
        await bench.collect(one_token(salt="tenant"))
        await bench.collect(one_token(random_prompt(4, 40), salt="tenant"))
        await cache.flush([Tier.L1])
        await bench.collect(one_token(random_prompt(5, 40), salt="tenant"))
        assert await cache.evict(None, "tenant") == PAGES + 2 + 2
        for prompt in (PROMPT, random_prompt(4, 40), random_prompt(5, 40)):
            assert await by_tier(bench, prompt, "tenant") == CachedByTier()
        assert await by_tier(bench) == CachedByTier(l2=FULL)

    play(scenario)


def test_pins_are_counted_in_every_tier_and_end(play: Any) -> None:
    async def scenario(cache: EngineCache) -> None:
        assert await cache.pin(prefix(), None) == PAGES
        assert {s.pinned_pages for s in (await cache.cache_stats()).tiers.values()} == {PAGES}
        assert await cache.pin(prefix(salt="other"), None) == 0
        assert await cache.unpin(prefix()) == PAGES
        assert await cache.unpin(prefix()) == 0
        assert await cache.pin(prefix(), 0.05) == PAGES
        await asyncio.sleep(0.1)
        assert {s.pinned_pages for s in (await cache.cache_stats()).tiers.values()} == {0}

    play(scenario)


def test_a_pinned_prefix_stays_in_a_full_l1(bench: Bench) -> None:
    cache = bench.engine.cache
    with bench.shrunk(10):
        bench.one(one_token())
        assert bench.ask(cache.pin(prefix(), None)) == PAGES
        for i in range(8):
            bench.one(one_token(random_prompt(50 + i, 60)))
        assert bench.one(one_token()).by_tier == CachedByTier(l1=FULL)
        other = random_prompt(51, 60)
        bench.one(one_token(other))
        with pytest.raises(FailedPreconditionError, match="at most half of l1's 10"):
            bench.ask(cache.pin(prefix(other), None))
        # A request that needs all of L1 gets it.
        assert len(bench.one(request(random_prompt(60, 100), 60)).tokens) == 60
        bench.ask(cache.unpin(prefix()))


def test_stats_count_pages_bytes_and_moves(bench: Bench) -> None:
    before = {tier: bench.stats(tier) for tier in Tier}
    bench.one(one_token())
    bench.ask(bench.engine.cache.drain_writes())
    after = {tier: bench.stats(tier) for tier in Tier}
    for tier in Tier:
        assert (after[tier].pages, after[tier].misses - before[tier].misses) == (PAGES, PAGES)
        assert 0 < after[tier].bytes < after[tier].bytes_capacity
        assert after[tier].drops == before[tier].drops
    assert [after[t].stores - before[t].stores for t in (Tier.L2, Tier.L3)] == [PAGES, PAGES]
    assert after[Tier.L3].bytes > after[Tier.L2].bytes == after[Tier.L1].bytes
    bench.flush(Tier.L1, Tier.L2)
    bench.one(one_token())
    loaded = bench.stats(Tier.L3)
    assert loaded.loads - after[Tier.L3].loads == PAGES
    assert loaded.read_bytes_per_s > 0
    assert loaded.write_bytes_per_s > 0


def test_a_stream_runs_on_while_writes_are_drained(bench: Bench) -> None:
    prompt = random_prompt(8, 170)

    async def scenario(go_on: threading.Event) -> None:
        tokens = 0

        async def read() -> None:
            nonlocal tokens
            async for _ in bench.stream(STREAMS[0]):
                tokens += 1

        stream = asyncio.create_task(read())
        await bench.collect(one_token(prompt))
        drain = asyncio.create_task(bench.engine.cache.drain_writes())
        before = tokens
        while tokens < before + 30:
            await asyncio.sleep(0.001)
        assert (await bench.engine.cache.lookup(prefix(prompt)))[Tier.L1] == 160
        assert not drain.done()
        go_on.set()
        await drain
        assert not stream.done()
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)

    with bench.disk_that_waits() as go_on:
        asyncio.run(scenario(go_on))


def test_after_the_end_of_the_engine_every_call_says_so() -> None:
    bench = build(tiny_checkpoint("llama3"), page_size=16, l1_tokens=L1_TOKENS, l2_gib=ALL_TIERS["l2_gib"])
    bench.stop()
    for call in (bench.engine.cache.cache_stats(), bench.engine.cache.drain_writes()):
        with pytest.raises(ShuttingDownError):
            bench.ask(call)
