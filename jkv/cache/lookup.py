"""What the tiers hold of a prompt, and what they have served. No jax.

Owner: the engine's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from jkv.cache.breaker import Breaker
from jkv.cache.disk_tier import DiskTier, is_fault
from jkv.cache.gate import CostGate
from jkv.cache.host_tier import HostTier
from jkv.cache.l1 import L1Pool
from jkv.cache.l3.reasons import Reason
from jkv.cache.pages import PEER, PageInfo, Source, Tier
from jkv.cache.peer_tier import PeerTier

_ABOVE = {Tier.L1: (), Tier.L2: (Tier.L1,), Tier.L3: (Tier.L1, Tier.L2)}


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When pages go down, and when they are worth bringing up (the flags of the same names)."""

    write: str = "write-through"
    load: str = "auto"
    load_timeout_s: float = 30.0
    l3_min_tokens: int = 0
    l3_admission: str = "always"


@dataclass(kw_only=True)
class TierCounts:
    """Totals since the start, in pages but for `hit_tokens`."""

    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    loads: int = 0
    stores: int = 0
    drops: int = 0


@dataclass(kw_only=True)
class Counts:
    by_tier: dict[Tier, TierCounts] = field(default_factory=lambda: {t: TierCounts() for t in Tier})
    late_loads: int = 0
    peer_tokens: int = 0  # of prompts, whose pages requests took from other engines


class TierLookup:
    """The tiers of one engine as a whole.

    `post` has a function called on the engine's thread.
    """

    def __init__(
        self,
        pool: L1Pool,
        host: HostTier,
        disk: DiskTier | None,
        *,
        gate: CostGate,
        policy: Policy,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool, self.host, self.disk = pool, host, disk
        self.gate, self.policy = gate, policy
        # Reading goes on where a full or read-only disk refuses writes.
        self.reading, self.writing = Breaker(clock), Breaker(clock)
        self.counts = Counts()
        self.peers: PeerTier | None = None  # in a cluster
        self._post, self._clock = post, clock

    @property
    def off(self) -> bool:
        """Whether there is no tier below L1."""
        return self.host.tree.capacity == 0

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Those that are on, L1 among them."""
        on = {Tier.L1: True, Tier.L2: self.host.keep, Tier.L3: self.disk is not None}
        return tuple(tier for tier in Tier if on[tier])

    def cached(self, infos: Sequence[PageInfo]) -> list[Tier]:
        """The nearest tier of each page of the longest cached prefix; changes nothing."""
        tiers: list[Tier] = []
        for info in infos:
            tier = self._nearest(info)
            if tier is None:
                break
            tiers.append(tier)
        return tiers

    def longest(self, infos: Sequence[PageInfo]) -> dict[Tier, int]:
        """Pages of the longest cached prefix by the nearest tier that has them; changes nothing."""
        cached = self.cached(infos)
        return {tier: cached.count(tier) for tier in Tier}

    def has(self, info: PageInfo) -> bool:
        """Whether a page below L1 need not be copied there again."""
        return self.host.find(info) is not None or (self.disk is not None and self.disk.has(info))

    def count_hit(self, source: Source, tokens: int) -> None:
        """A request took a page from there, for this many of its tokens; the tiers above lacked it."""
        if source == PEER:
            self.counts.peer_tokens += tokens
            return
        tier = Tier(source)
        counts = self.counts.by_tier[tier]
        counts.hits += 1
        counts.hit_tokens += tokens
        self._count_misses(1, _ABOVE[tier])

    def _nearest(self, info: PageInfo) -> Tier | None:
        if self.pool.find(info) is not None:
            return Tier.L1
        page = self.host.find(info)
        if page is not None:
            return Tier.L2 if page.payload is not None else Tier.L3
        return Tier.L3 if self.disk is not None and self.disk.find(info) is not None else None

    def _touch(self, infos: Sequence[PageInfo]) -> None:
        keys = [info.key for info in infos]
        self.host.touch(keys)
        if self.disk is not None:
            self.disk.touch(keys)

    def _count_misses(self, pages: int, tiers: Iterable[Tier]) -> None:
        there = {Tier.L1: True, Tier.L2: self.host.keep, Tier.L3: self.disk is not None}
        for tier in tiers:
            self.counts.by_tier[tier].misses += pages if there[tier] else 0


def tell(breaker: Breaker, reason: Reason | None) -> None:
    """Has a breaker hear how an operation ended."""
    if is_fault(reason):
        breaker.failed()
    elif reason is None:
        breaker.succeeded()
