"""An engine's metrics, from what its engine, its cache and its place in the cluster count."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import Metric

from jkv.cache.breaker import BreakerState
from jkv.cache.control import CacheControl, CacheStats
from jkv.cache.pages import PEER, Tier
from jkv.engine.stats import EngineStats
from jkv.errors import ShuttingDownError
from jkv.metrics import counter, gauge

# The engine answers between two steps. What it does not answer by then, as in a long one, is left out.
_CACHE_TIMEOUT_S = 5.0
_TIER = ("tier",)


class Measured(Protocol):
    @property
    def stats(self) -> EngineStats: ...
    @property
    def cache(self) -> CacheControl: ...


class Membership(Protocol):
    """An engine's place in its cluster. `recording` is whether its L3 pages are recorded, None without L3."""

    @property
    def registered(self) -> bool: ...
    @property
    def recording(self) -> bool | None: ...


class EngineMetrics:
    """Of the process alone until a model serves. Owner: the event loop."""

    def __init__(self) -> None:
        self._engine: Measured | None = None
        self._serving = False
        self.member: Membership | None = None

    def open(self, engine: Measured) -> None:
        """The engine takes requests from now on."""
        self._engine, self._serving = engine, True

    def close(self) -> None:
        """It takes no new ones; those that run still show."""
        self._serving = False

    async def read(self) -> list[Metric]:
        engine = self._engine
        found = [gauge("jkv_serving", "1 while the engine takes requests", self._serving)]
        if engine is not None:
            found += _engine(engine.stats)
            with contextlib.suppress(TimeoutError, ShuttingDownError):
                async with asyncio.timeout(_CACHE_TIMEOUT_S):
                    found += _cache(await engine.cache.cache_stats())
        if self.member is not None:
            found += _membership(self.member)
        return found


def _engine(stats: EngineStats) -> Iterator[Metric]:
    yield gauge("jkv_requests_running", "requests that have a slot", stats.running)
    yield gauge("jkv_requests_waiting", "requests in the queue", stats.waiting)
    yield counter("jkv_steps", "steps dispatched to the device", stats.steps)
    yield counter("jkv_prompt_tokens", "tokens of prompts whose first token is there", stats.prompt_tokens)
    yield counter("jkv_generated_tokens", "tokens sampled", stats.generated_tokens)
    yield counter("jkv_preemptions", "requests that gave their pages back and waited", stats.preemptions)
    states = {("in_use",): stats.l1.in_use, ("cached",): stats.l1.cached, ("free",): stats.l1.free}
    yield gauge("jkv_l1_pages", "pages on the device by state", states, ("state",))


def _cache(stats: CacheStats) -> Iterator[Metric]:
    tiers = stats.tiers
    cached = {**{(tier.value,): one.hit_tokens for tier, one in tiers.items()}, (PEER,): stats.peer_tokens}
    yield counter(
        "jkv_cached_tokens", "prompt tokens that were not computed, by who served them", cached, _TIER
    )
    for name, meaning, attribute in _GAUGES:
        yield gauge(name, meaning, _each(tiers, attribute), _TIER)
    for name, meaning, attribute in _COUNTERS:
        yield counter(name, meaning, _each(tiers, attribute), _TIER)
    errors = {(t.value, reason): n for t, one in tiers.items() for reason, n in one.errors.items()}
    yield counter("jkv_cache_errors", "operations of a tier that failed", errors, ("tier", "reason"))
    states = {(t.value, s.value): one.breaker == s for t, one in tiers.items() for s in BreakerState}
    yield gauge("jkv_cache_breaker", "1 for the state of a tier's breaker", states, ("tier", "state"))
    yield gauge("jkv_cache_pending_writes", "pages on their way to a tier below", stats.pending_writes)
    yield counter("jkv_cache_gated_loads", "loads not made: computing is faster", stats.gated_loads)
    yield counter("jkv_cache_late_loads", "loads cut off at their deadline", stats.late_loads)
    yield gauge("jkv_prefill_tokens_per_second", "measured speed of prefill", stats.prefill_tokens_per_s)


_GAUGES = (
    ("jkv_cache_pages", "pages in a tier", "pages"),
    ("jkv_cache_capacity_pages", "pages that fit into a tier", "pages_capacity"),
    ("jkv_cache_bytes", "bytes in a tier", "bytes"),
    ("jkv_cache_capacity_bytes", "bytes that fit into a tier", "bytes_capacity"),
    ("jkv_cache_pinned_pages", "pages exempt from eviction", "pinned_pages"),
    ("jkv_cache_read_bytes_per_second", "measured speed of loads from a tier", "read_bytes_per_s"),
    ("jkv_cache_write_bytes_per_second", "measured speed of writes into a tier", "write_bytes_per_s"),
)
_COUNTERS = (
    ("jkv_cache_hits", "pages that a tier served", "hits"),
    ("jkv_cache_misses", "pages that a tier was asked for in vain", "misses"),
    ("jkv_cache_evictions", "pages evicted from a tier", "evictions"),
    ("jkv_cache_loads", "pages brought up from a tier", "loads"),
    ("jkv_cache_stores", "pages written into a tier", "stores"),
    ("jkv_cache_drops", "pages that should have been written into a tier and were not", "drops"),
    ("jkv_cache_quarantined", "pages set aside: their content was not what it should be", "quarantined"),
)


def _each(tiers: Mapping[Tier, object], attribute: str) -> dict[tuple[str, ...], float]:
    return {(tier.value,): getattr(stats, attribute) for tier, stats in tiers.items()}


def _membership(member: Membership) -> Iterator[Metric]:
    yield gauge("jkv_cluster_registered", "1 while the engine's record is in etcd", member.registered)
    if member.recording is not None:
        yield gauge("jkv_cluster_recording", "1 while its L3 pages are recorded in etcd", member.recording)
