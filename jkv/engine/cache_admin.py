"""What operators ask of the cache, done between two steps. Owner: the engine's thread."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jkv.cache.breaker import BreakerState
from jkv.cache.control import CacheStats, TierStats
from jkv.cache.pages import SALT_TAG_BYTES, PageInfo, Tier
from jkv.engine.scheduler import Scheduler
from jkv.engine.transfers import Transfers
from jkv.errors import FailedPreconditionError, InvalidRequestError


class CacheAdmin:
    """Looks into the tiers and changes what they hold; `done` is called at once, or when I/O has ended."""

    def __init__(self, scheduler: Scheduler, transfers: Transfers, page_bytes: int) -> None:
        self._pool, self._lower, self._transfers = scheduler.pool, scheduler.lower, transfers
        self._page_bytes = page_bytes

    def stats(self) -> CacheStats:
        lower = self._lower
        lower.expire_pins()
        tiers = {Tier.L1: self._l1_stats()}
        if lower.host.keep:
            tiers[Tier.L2] = self._l2_stats()
        if lower.disk is not None:
            tiers[Tier.L3] = self._l3_stats()
        return CacheStats(
            tiers=tiers,
            prefill_tokens_per_s=lower.gate.prefill_tokens_per_s,
            pending_writes=lower.pending_writes,
            gated_loads=lower.gate.gated,
            late_loads=lower.counts.late_loads,
            peer_tokens=lower.counts.peer_tokens,
        )

    def lookup(self, infos: Sequence[PageInfo], prompt_tokens: int) -> Mapping[Tier, int]:
        """Tokens that a request with this prompt would get; its last one is always computed."""
        left = prompt_tokens - 1
        tokens: dict[Tier, int] = {}
        for tier, pages in self._lower.longest(infos).items():
            tokens[tier] = min(pages * self._pool.page_size, left)
            left -= tokens[tier]
        return tokens

    def pin(self, infos: Sequence[PageInfo], until: float) -> int:
        """Pins what is cached of a prefix.

        Raises:
            FailedPreconditionError: it would leave less than half of a tier to everything else.
        """
        found = infos[: sum(self._lower.longest(infos).values())]
        self._lower.pin(found, until)
        return len(found)

    def unpin(self, infos: Sequence[PageInfo]) -> int:
        return self._lower.unpin(infos)

    def prefetch(self, infos: Sequence[PageInfo], tier: Tier, done: Callable[[int], None]) -> None:
        """Calls `done` with the tokens that are in this tier, or above it, when no more of them will come."""
        self._need(tier)

        def count() -> None:
            found = self._lower.longest(infos)
            pages = found[Tier.L1] + (found[Tier.L2] if tier is Tier.L2 else 0)
            done(pages * self._pool.page_size)

        self._transfers.prefetch(infos, tier, count)

    def demote(self, tier: Tier, done: Callable[[int], None]) -> None:
        below = Tier.L2 if tier is Tier.L1 else Tier.L3
        self._need(tier)
        if self._lower.off or (below is Tier.L3 and self._lower.disk is None):
            raise FailedPreconditionError(f"nothing is below {tier.value}: {_how_to_turn_on(below)}")
        if tier is Tier.L1:
            done(self._transfers.demote())
            return
        self._lower.store_all()
        self._lower.when_drained(lambda: done(self._lower.drop_host(stored_only=True)))

    def flush(self, tiers: Sequence[Tier], done: Callable[[Mapping[Tier, int]], None]) -> None:
        for tier in tiers:
            self._need(tier)
        drop = {Tier.L1: self._flush_l1, Tier.L2: self._lower.drop_host, Tier.L3: self._flush_l3}

        def drop_all() -> None:
            counts = {tier: drop[tier]() for tier in tiers}
            self._when_deleted(lambda: done(counts))

        if set(tiers) <= {Tier.L1}:
            drop_all()
        else:  # a page on its way down would be back in its tier a moment later
            self._lower.when_drained(drop_all)

    def drain(self, done: Callable[[None], None]) -> None:
        self._lower.when_drained(lambda: done(None))

    def evict_prefix(self, infos: Sequence[PageInfo], done: Callable[[int], None]) -> None:
        """Evicts the pages of a prefix from its end up to the first one that something else continues."""

        def evict() -> None:
            below = self._children()
            gone: set[bytes] = set()
            for info in reversed(infos):
                if below[info.key] - gone:
                    break
                if self._forget(info.key):
                    gone.add(info.key)
            self._when_deleted(lambda: done(len(gone)))

        self._lower.when_drained(evict)

    def evict_salt(self, root: bytes, done: Callable[[int], None]) -> None:
        """Evicts every page of one request root."""

        def evict() -> None:
            tag, disk = root[:SALT_TAG_BYTES], self._lower.disk
            keys = {page.info.key for page in self._pool.held() if page.info.root == root}
            keys |= {page.info.key for page in self._lower.host.pages() if page.info.root == root}
            if disk is not None:
                keys |= {page.key for page in disk.own_pages() if page.salt_tag == tag}
            count = sum(self._forget(key) for key in keys)
            self._when_deleted(lambda: done(count))

        self._lower.when_drained(evict)

    def _need(self, tier: Tier) -> None:
        lower = self._lower
        on = {Tier.L1: True, Tier.L2: lower.host.keep, Tier.L3: lower.disk is not None}
        if not on[tier]:
            raise InvalidRequestError("tier", f"{tier.value} is off: {_how_to_turn_on(tier)}")

    def _flush_l1(self) -> int:
        keys = [page.info.key for page in self._pool.held()]
        return sum(self._pool.forget(key) for key in keys)

    def _flush_l3(self) -> int:
        disk = self._lower.disk
        assert disk is not None
        return sum(disk.remove(page.key) for page in disk.own_pages())

    def _forget(self, key: bytes) -> bool:
        """Drops a page from every tier; one in use stays with its users alone."""
        lower = self._lower
        found = self._pool.forget(key)
        page = lower.host.tree.get(key)
        if page is not None and not page.holds:
            lower.host.drop(page)
            found = True
        return (lower.disk is not None and lower.disk.remove(key)) or found

    def _children(self) -> defaultdict[bytes, set[bytes]]:
        """The keys of the pages that continue each page, in any tier."""
        below: defaultdict[bytes, set[bytes]] = defaultdict(set)
        disk = self._lower.disk
        for page in (*self._pool.held(), *self._lower.host.pages()):
            below[page.info.parent].add(page.info.key)
        for page in disk.own_pages() if disk is not None else ():
            below[page.parent].add(page.key)
        return below

    def _when_deleted(self, done: Callable[[], None]) -> None:
        if self._lower.disk is None:
            done()
        else:
            self._lower.disk.when_deleted(done)

    def _l1_stats(self) -> TierStats:
        pool = self._pool
        return self._tier(
            Tier.L1,
            pages=pool.cached,
            pages_capacity=pool.total,
            bytes=pool.cached * self._page_bytes,
            bytes_capacity=pool.total * self._page_bytes,
            pinned_pages=pool.pinned,
            evictions=pool.evictions,
        )

    def _l2_stats(self) -> TierStats:
        tree = self._lower.host.tree
        return self._tier(
            Tier.L2,
            pages=len(tree),
            pages_capacity=tree.capacity,
            bytes=len(tree) * self._page_bytes,
            bytes_capacity=tree.capacity * self._page_bytes,
            pinned_pages=tree.pinned,
            evictions=tree.evictions,
            read_bytes_per_s=self._lower.gate.load_pages_per_s(Tier.L2) * self._page_bytes,
        )

    def _l3_stats(self) -> TierStats:
        lower, disk = self._lower, self._lower.disk
        assert disk is not None
        reading, writing = lower.reading.state, lower.writing.state
        return self._tier(
            Tier.L3,
            pages=len(disk),
            pages_capacity=disk.capacity,
            bytes=disk.bytes,
            bytes_capacity=disk.capacity_bytes,
            pinned_pages=disk.tree.pinned,
            evictions=disk.tree.evictions,
            quarantined=disk.quarantined,
            errors=dict(disk.errors),
            read_bytes_per_s=lower.read_speed.per_s,
            write_bytes_per_s=lower.write_speed.per_s,
            breaker=(reading if reading is not BreakerState.CLOSED else writing).value,
        )

    def _tier(self, tier: Tier, **now: Any) -> TierStats:
        return TierStats(**dataclasses.asdict(self._lower.counts.by_tier[tier]), **now)


def _how_to_turn_on(tier: Tier) -> str:
    return "start the server with --l3-dir" if tier is Tier.L3 else "start the server with --l2-gib above 0"
