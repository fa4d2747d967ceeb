"""The tiers below the device: what they hold of a prompt, and what moves up and down. No jax.

Owner: the engine's thread. Reads and writes of L3 run on the store's threads, and their outcomes come back
through `post`, which has a function called on the engine's thread. Copies between L1 and L2 are dispatched
by the engine: it asks here what to copy, and tells when it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from jkv.cache.gate import CostGate
from jkv.cache.host_tier import HostTier
from jkv.cache.l1 import L1Pool
from jkv.cache.lookup import Policy
from jkv.cache.page_tree import PageTree
from jkv.cache.pages import PageInfo, Tier
from jkv.cache.saving import Saving
from jkv.errors import FailedPreconditionError


class LowerTiers(Saving):
    """L2 and L3 beneath an L1 pool."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See TierLookup."""
        super().__init__(*args, **kwargs)
        self._pins: dict[bytes, float] = {}  # until when, by the clock

    @classmethod
    def none(cls, pool: L1Pool) -> LowerTiers:
        """Nothing below L1."""

        gate = CostGate(page_size=pool.page_size, clock=time.monotonic)
        host = HostTier(0, keep=False)
        return cls(pool, host, None, gate=gate, policy=Policy(), post=lambda call: call())

    def drop_host(self, *, stored_only: bool = False) -> int:
        """Drops every page of L2 that nobody needs just now, or of these only what L3 has and no pin keeps;
        returns how many.
        """
        pages = [p for p in self.host.pages() if not p.holds]
        if stored_only:
            pages = [p for p in pages if self.disk is not None and self._may_give_way(p)]
        for page in pages:
            self.host.drop(page)
        return len(pages)

    def drop_unusable(self, usable: Callable[[Any], bool]) -> None:
        """Drops the pages of L2 whose copy failed with the step that it waited for."""
        for page in self.host.pages():
            if page.payload is not None and not usable(page.payload):
                page.failed = True
                if not page.holds:
                    self.host.drop(page)

    def pin(self, infos: Sequence[PageInfo], until: float) -> None:
        """Keeps a prefix in every tier that has it until then, by the clock.

        Raises:
            FailedPreconditionError: less than half of a tier would be left to everything else.
        """
        new = [info for info in infos if info.key not in self._pins]
        for tier, pinned, capacity in (
            (Tier.L1, len(self._pins) + len(new), self.pool.total),
            (Tier.L2, self.host.tree.pinned + len(new), self.host.tree.capacity if self.host.keep else 0),
            (
                Tier.L3,
                0 if self.disk is None else self.disk.tree.pinned + len(new),
                0 if self.disk is None else self.disk.capacity,
            ),
        ):
            if capacity and pinned > capacity // 2:
                raise FailedPreconditionError(
                    f"{pinned} pages would be pinned; at most half of {tier.value}'s {capacity} may be"
                )
        for info in infos:
            self._pins[info.key] = max(until, self._pins.get(info.key, until))
            self.pool.pin(info.key)
            for tree in self._trees():
                if info.key in tree:
                    tree.pin(info.key, until)

    def unpin(self, infos: Sequence[PageInfo]) -> int:
        """Ends pins; returns how many pages had one."""
        pinned = [info.key for info in infos if self._pins.pop(info.key, None) is not None]
        for key in pinned:
            self.pool.unpin(key)
            for tree in self._trees():
                tree.unpin(key)
        return len(pinned)

    def expire_pins(self) -> None:
        """Ends the pins that are due."""
        if not self._pins:
            return
        now = self._clock()
        for tree in self._trees():
            tree.expire(now)
        for key in [key for key, until in self._pins.items() if until <= now]:
            del self._pins[key]
            self.pool.unpin(key)

    def close(self) -> None:
        """Ends L3; what is still to be written is lost."""
        if self.disk is not None:
            self.disk.close()

    def check(self) -> None:
        """Raises AssertionError where the bookkeeping contradicts itself."""
        self.host.tree.check()
        assert len(self.host.tree) <= self.host.tree.capacity
        if self.disk is not None:
            self.disk.tree.check()

    def _trees(self) -> list[PageTree[Any]]:
        return [self.host.tree, *([self.disk.tree] if self.disk is not None else [])]
