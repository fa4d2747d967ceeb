"""A disk tier without pages is there all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jkv.cache.disk_tier import DiskTier
from jkv.cache.gate import CostGate
from jkv.cache.host_tier import HostTier
from jkv.cache.l1 import L1Pool
from jkv.cache.lookup import Policy
from jkv.cache.lower import LowerTiers
from jkv.cache.pages import Tier
from tests.cache.l3.pages import PAGE_SIZE, chain, identity, open_store
from tests.cache.tiers import ByteCodec


def test_misses_are_counted_in_a_tier_that_is_still_empty(tmp_path: Path) -> None:
    calls: list[Callable[[], None]] = []
    store, model = open_store(tmp_path, identity()), identity()
    disk = DiskTier(store, store.list(), 2**20, ByteCodec(), calls.append)
    gate = CostGate(page_size=PAGE_SIZE, clock=lambda: 0.0)
    host = HostTier(4, keep=True)
    lower = LowerTiers(L1Pool(4, PAGE_SIZE), host, disk, gate=gate, policy=Policy(), post=calls.append)
    assert lower.begin(chain(model, 3)) is None
    assert {tier: lower.counts.by_tier[tier].misses for tier in Tier} == dict.fromkeys(Tier, 3)
    lower.close()
