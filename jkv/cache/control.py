"""What an operator may ask of a cache, and what it answers. No jax, no I/O: API servers and tests build these
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jkv.cache.pages import Tier


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """A prompt's tokens under a salt; only its full pages count."""

    token_ids: Sequence[int]
    cache_salt: str = ""


@dataclass(frozen=True, kw_only=True)
class TierStats:
    """One tier's state now, and its totals since the start.

    A page is counted as a hit in the tier that served it, and as a miss in every tier that was asked in vain.
    Speeds are in bytes a second, smoothed, 0 before the first transfer.
    """

    pages: int = 0
    pages_capacity: int = 0
    bytes: int = 0
    bytes_capacity: int = 0
    pinned_pages: int = 0
    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    loads: int = 0  # pages brought up from this tier
    stores: int = 0  # pages written into this tier
    drops: int = 0  # pages that should have been written into it and were not: no room, no budget, a fault
    quarantined: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)  # by reason
    read_bytes_per_s: float = 0.0
    write_bytes_per_s: float = 0.0
    breaker: str = "closed"  # closed | open | half-open


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """All tiers that are on, and the measured speed of computing instead, in tokens a second."""

    tiers: Mapping[Tier, TierStats]
    prefill_tokens_per_s: float = 0.0
    pending_writes: int = 0
    gated_loads: int = 0  # loads not made because computing is faster
    late_loads: int = 0  # loads cut off at their deadline
    peer_tokens: int = 0  # hit tokens of pages that came from other engines


class CacheControl(Protocol):
    """Admin calls; they wait for a step boundary and never disturb a stream.

    Raises:
        InvalidRequestError: a tier that is off, a prefix without a full page.
        FailedPreconditionError: what is asked cannot be done now, and why.
    """

    async def cache_stats(self) -> CacheStats: ...

    async def lookup(self, prefix: Prefix) -> Mapping[Tier, int]:
        """Tokens of the longest cached prefix, each counted in the nearest tier that holds it; changes
        nothing.
        """
        ...

    async def pin(self, prefix: Prefix, ttl_s: float | None) -> int:
        """Exempts the cached pages of a prefix from eviction in every tier; returns how many pages."""
        ...

    async def unpin(self, prefix: Prefix) -> int: ...

    async def prefetch(self, prefix: Prefix, tier: Tier) -> int:
        """Brings a prefix up into L1 or L2; returns how many of its tokens are there then."""
        ...

    async def demote(self, tier: Tier) -> int:
        """Writes what a tier holds alone into the tier below, then drops it; returns how many pages."""
        ...

    async def flush(self, tiers: Sequence[Tier]) -> Mapping[Tier, int]:
        """Drops all pages of these tiers only; returns how many."""
        ...

    async def drain_writes(self) -> None:
        """Returns when every background write is published, and synced where writes are."""
        ...

    async def evict(self, prefix: Prefix | None, cache_salt: str | None) -> int:
        """Drops from all tiers the pages of a prefix that no other prefix continues, or those of a salt."""
        ...
