from __future__ import annotations

from pathlib import Path

import pytest

from jkv.bench.replay import Replay
from jkv.bench.trace_file import TraceRequest, ideal_hit_tokens, lru_hit_tokens, read_trace
from jkv.cache.pages import Tier

from .traces import make_trace


def request(*ids: int, tail: int = 0) -> TraceRequest:
    length = 512 * len(ids) + tail
    return TraceRequest(input_length=length, hash_ids=(*ids, 999) if tail else ids)


def test_pages_come_from_the_nearest_tier() -> None:
    replay = Replay(l1=4, l2=8, l3=100)
    assert replay.serve(request(1, 2, 3, tail=9)) == {}
    assert replay.serve(request(1, 2, 3, tail=9)) == {Tier.L1: 1536}
    replay.serve(request(4, 5, 6, tail=9))
    assert replay.serve(request(1, 2, 3, tail=9)) == {Tier.L2: 1536}
    for first in range(10, 40, 3):
        replay.serve(request(first, first + 1, first + 2, tail=9))
    assert replay.serve(request(1, 2, 3, tail=9)) == {Tier.L3: 1536}
    replay.check()


@pytest.mark.parametrize("l2", [40_000, 1000])
def test_a_prefix_of_millions_of_tokens_is_found_in_every_tier(l2: int) -> None:
    blocks = 15_625  # a million tokens in pages of 64
    prompts = [request(*range(first, first + blocks), tail=9) for first in range(0, 4_000_000, 1_000_000)]
    replay = Replay(l1=blocks + 10, l2=l2, l3=4 * blocks)
    first, second, *others = prompts
    assert replay.serve(first) == {}
    assert replay.serve(first) == {Tier.L1: 512 * blocks}
    replay.serve(second)
    again = replay.serve(first)
    assert sum(again.values()) == 512 * blocks
    assert again[Tier.L2 if l2 > blocks else Tier.L3] > 512 * 15_000
    for other in others:
        replay.serve(other)
    last = replay.serve(second)
    assert sum(last.values()) == 512 * blocks
    assert last[Tier.L3] > 512 * 14_000
    replay.check()


def test_a_prompt_of_full_blocks_is_a_hit_to_its_end() -> None:
    replay = Replay(l1=4, l2=0, l3=0)
    replay.serve(request(1, 2))
    assert sum(replay.serve(request(1, 2)).values()) == 1024


@pytest.mark.parametrize("tier", ["l1", "l2", "l3"])
def test_a_cache_with_room_for_all_reaches_the_ideal_less_partly_filled_blocks(
    tmp_path: Path, tier: str
) -> None:
    requests = read_trace(make_trace(tmp_path / "trace.jsonl", requests=150))
    longest = max(len(r.hash_ids) for r in requests) + 1
    shapes = {"l1": (5000, 0, 0), "l2": (longest, 5000, 0), "l3": (longest, 2 * longest, 5000)}
    l1, l2, l3 = shapes[tier]
    replay = Replay(l1=l1, l2=l2, l3=l3)
    served = [replay.serve(r) for r in requests]
    assert any(Tier(tier) in tiers for tiers in served)
    hits = sum(sum(tiers.values()) for tiers in served)
    assert hits == ideal_hit_tokens([request(*r.full_ids) for r in requests if r.full_ids])
    replay.check()


@pytest.mark.parametrize("seed", range(3))
def test_no_tier_serves_less_than_a_plain_list_of_its_size(tmp_path: Path, seed: int) -> None:
    requests = read_trace(make_trace(tmp_path / "trace.jsonl", requests=200, seed=seed))
    longest = max(len(r.hash_ids) for r in requests) + 1
    for capacity in (longest, 100, 300):
        shapes = [(longest, capacity, 0), (longest, 2 * longest, capacity)]
        for l1, l2, l3 in [(capacity, 0, 0), *shapes] if capacity >= longest else shapes:
            replay = Replay(l1=l1, l2=l2, l3=l3)
            hits = sum(sum(replay.serve(r).values()) for r in requests)
            assert hits >= lru_hit_tokens(requests, capacity), (capacity, l1, l2, l3)
