"""L2's bookkeeping: which pages host memory holds, and who still needs them. No jax, no I/O.

Owner: the engine's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from jkv.cache.events import ChangeLog
from jkv.cache.load import L2Page
from jkv.cache.page_tree import PageTree
from jkv.cache.pages import PageInfo, Tier


class HostTier:
    """At most `capacity` pages, which is a hard bound: pages on their way in count as well.

    Where `keep` is false, it is a staging area: a page goes as soon as nobody holds it. `dirty` are the pages
    for L3 that it has not been offered yet, oldest first; their owner takes them out, and `on_lost`, where
    set, hears of those that go before.
    """

    def __init__(self, capacity: int, *, keep: bool, changes: ChangeLog | None = None) -> None:
        self.keep = keep
        self._changes = changes if keep else None
        self.tree: PageTree[L2Page] = PageTree(capacity)
        self.held = 0
        self.on_lost: Callable[[L2Page], None] | None = None
        self.dirty: OrderedDict[bytes, L2Page] = OrderedDict()

    def find(self, info: PageInfo) -> L2Page | None:
        """The page with this identity, there or on its way."""
        page = self.tree.get(info.key)
        return page if page is not None and page.info == info and not page.failed else None

    def pages(self) -> list[L2Page]:
        """All pages, the least recently used first."""
        return [p for key in self.tree.keys_oldest_first() if (p := self.tree.get(key)) is not None]

    def add(self, info: PageInfo, payload: Any | None) -> L2Page | None:
        """Takes a page in; None where there is no room, or where another page has its key."""
        if info.key in self.tree:
            return None
        page = L2Page(info, payload)
        evicted = self.tree.add(info.key, info.parent, page)
        if evicted is None:
            return None
        for _, old in evicted:
            self._gone(old)
        if payload is not None:
            self._report(page)
        return page

    def arrived(self, page: L2Page, payload: Any | None) -> None:
        """Ends the reading of a page; without a payload it has failed."""
        page.payload, page.failed = payload, payload is None
        if payload is not None:
            self._report(page)

    def touch(self, keys: Iterable[bytes]) -> None:
        self.tree.touch(keys)

    def hold(self, page: L2Page) -> None:
        """Keeps a page from eviction until released."""
        page.holds += 1
        if page.holds == 1:
            self.held += 1
            self.tree.hold(page.info.key)

    def release(self, page: L2Page) -> None:
        page.holds -= 1
        if page.holds:
            return
        self.held -= 1
        self.tree.release(page.info.key)
        if page.failed or page.payload is None or not self.keep:
            self.drop(page)

    def drop(self, page: L2Page) -> None:
        """Takes a page out that nobody holds."""
        self.tree.remove(page.info.key)
        self._gone(page)

    def _gone(self, page: L2Page) -> None:
        """Whoever still has the page in a queue must not keep its memory."""
        if self.dirty.pop(page.info.key, None) is not None and self.on_lost is not None:
            self.on_lost(page)
        if page.payload is not None and self._changes is not None:
            self._changes.remove(Tier.L2, page.info.key)
        page.payload, page.failed = None, True

    def _report(self, page: L2Page) -> None:
        if self._changes is not None:
            self._changes.add(Tier.L2, page.info.key)
