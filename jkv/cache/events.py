"""What changes in the tiers, for those who follow an engine from elsewhere. No jax, no I/O.

Owner: the engine's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from jkv.cache.pages import Tier

# Changes kept for followers that lost their connection for a moment.
_KEPT_PAGES = 100_000


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What came into each tier and what left it, net, up to and including change `number`."""

    number: int
    added: dict[Tier, list[bytes]]
    removed: dict[Tier, list[bytes]]

    @property
    def pages(self) -> int:
        return sum(map(len, self.added.values())) + sum(map(len, self.removed.values()))


@dataclass(eq=False)
class ChangeLog:
    """Collects what the tiers report, and numbers it in the order in which it is taken.

    A number covers all changes between two calls of `take`, of which each page's last one counts.
    """

    number: int = 0
    _open: dict[tuple[Tier, bytes], bool] = field(default_factory=dict)
    _kept: deque[Changes] = field(default_factory=deque)
    _kept_pages: int = 0

    def add(self, tier: Tier, key: bytes) -> None:
        self._open[tier, key] = True

    def remove(self, tier: Tier, key: bytes) -> None:
        self._open[tier, key] = False

    def remove_all(self, tier: Tier, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.remove(tier, key)

    def take(self) -> Changes | None:
        """The changes since the last call, None where there were none."""
        if not self._open:
            return None
        self.number += 1
        changes = Changes(number=self.number, added={}, removed={})
        for (tier, key), there in self._open.items():
            (changes.added if there else changes.removed).setdefault(tier, []).append(key)
        self._open = {}
        self._keep(changes)
        return changes

    def since(self, number: int) -> list[Changes] | None:
        """What was taken after change `number`; None where that is not kept any more, or never was."""
        if number > self.number or number < self.number - len(self._kept):
            return None
        return list(self._kept)[len(self._kept) - (self.number - number) :] if number < self.number else []

    def _keep(self, changes: Changes) -> None:
        self._kept.append(changes)
        self._kept_pages += changes.pages
        while self._kept_pages > _KEPT_PAGES and len(self._kept) > 1:
            self._kept_pages -= self._kept.popleft().pages
