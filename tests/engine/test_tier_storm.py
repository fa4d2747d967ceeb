"""All tiers too small at once: every step evicts, stores and loads, and everyone gets the answer of a quiet
engine.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jkv.cache.pages import Tier
from jkv.config import GIB
from jkv.engine.request import EngineRequest, FinishReason
from tests.engine.conftest import ALL_TIERS, L1_TOKENS
from tests.engine.harness import Bench, Outcome, build, random_prompt, tiny_checkpoint, wait_for, with_salt
from tests.engine.test_bit_equal import varied

_PAGE, _L1_PAGES, _L2_PAGES = 16, 8, 24
_PAGE_BYTES = 12288  # of the tiny model
_AT_ONCE = 64


@pytest.fixture(scope="module", params=["write-through", "write-back"])
def crowded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Its L2 and L3 are small from the start; L1 is for each test to shrink."""
    tiers: dict[str, Any] = {
        **ALL_TIERS,
        "l2_gib": (_L2_PAGES + 0.5) * _PAGE_BYTES / GIB,
        "l3_gib": 0.0025,  # some 90 pages
        "l3_dir": str(tmp_path_factory.mktemp("l3")),
        "write_policy": request.param,
    }
    flags = {**tiers, "batch_invariant": True, "max_queue": 4096}
    bench = build(tiny_checkpoint("llama3"), page_size=_PAGE, l1_tokens=L1_TOKENS, **flags)
    assert bench.scheduler.lower.host.tree.capacity == _L2_PAGES
    yield bench
    bench.settle()
    bench.stop()
    assert bytes_on_disk(tiers["l3_dir"]) <= tiers["l3_gib"] * GIB


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.full)])
def test_everyone_gets_the_answer_of_a_quiet_engine(crowded: Bench, count: int) -> None:
    bench, rng = crowded, random.Random(count)
    distinct = [varied(i, draw_prompt(rng, i % 9), rng.choice((1, 4, 9, 20))) for i in range(36)]
    expected = [bench.cold(r).bits for r in distinct]
    bench.settle()
    before = {tier: bench.stats(tier) for tier in Tier}
    with bench.shrunk(_L1_PAGES):
        drawn = [rng.randrange(len(distinct)) for _ in range(count)]
        salts = [rng.choice(("", "", "tenant")) for _ in drawn]
        requests = [with_salt(distinct[i], salt) for i, salt in zip(drawn, salts, strict=True)]
        outcomes = asyncio.run(run_all(bench, requests))
    for number, outcome in zip(drawn, outcomes, strict=True):
        assert outcome.finish_reason is FinishReason.LENGTH
        assert outcome.bits == expected[number]
    assert not bench.violations
    wait_for(lambda: bench.scheduler.lower.pending_writes == 0)
    wait_for(lambda: bench.scheduler.lower.host.held == 0)
    for tier in Tier:
        after = bench.stats(tier)
        assert after.hits > before[tier].hits, f"{tier} never served"
        assert after.pages <= after.pages_capacity
    assert bench.stats(Tier.L2).evictions > before[Tier.L2].evictions
    assert bench.stats(Tier.L3).evictions > before[Tier.L3].evictions or count < 2000
    assert bench.stats(Tier.L3).errors == {}
    assert sum(o.by_tier.l2 + o.by_tier.l3 for o in outcomes) > 0


def draw_prompt(rng: random.Random, family: int) -> list[int]:
    """Of up to 6 pages, so that two requests fit L1 just so."""
    return random_prompt(family, 100)[: rng.choice((15, 16, 17, 33, 48, 64, 81, 96))]


async def run_all(bench: Bench, requests: list[EngineRequest]) -> list[Outcome]:
    places = asyncio.Semaphore(_AT_ONCE)

    async def take_place(r: EngineRequest) -> Outcome:
        async with places:
            return await bench.collect(r)

    return await asyncio.gather(*map(take_place, requests))


def bytes_on_disk(directory: str) -> int:
    """As `du` counts."""
    paths = [Path(root, name) for root, _, files in os.walk(directory) for name in files]
    return sum(path.lstat().st_blocks * 512 for path in paths)
