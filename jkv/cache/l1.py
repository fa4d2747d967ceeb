"""L1's bookkeeping: which device page holds what, who uses it, and what may be evicted. No jax, no I/O.

Owner: the engine's thread. A page is free, filling (private to requests that compute it) or cached (full,
found by its key). Cached pages nobody uses stay until their room is needed, least recently used first. A
request uses whole prefixes and gives its pages back deepest first, so that order also evicts leaves before
their parents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from jkv.cache.keys import pack_tokens


@dataclass(slots=True)
class _Page:
    refs: int = 0
    key: bytes | None = None
    tokens: bytes = b""  # packed


@dataclass(frozen=True, kw_only=True)
class L1Counts:
    """Pages by state; `free + in_use + cached == total` always holds."""

    total: int
    free: int
    in_use: int
    cached: int


class L1Pool:
    """Pages `0 .. total - 1` of the device pool and the prefix index over the cached ones."""

    def __init__(self, total: int, page_size: int) -> None:
        if total < 1 or page_size < 1:
            raise ValueError(f"an L1 pool needs pages and a page size, got {total} and {page_size}")
        self.total, self.page_size = total, page_size
        self.evictions = 0
        self._pages = [_Page() for _ in range(total)]
        self._free = list(range(total - 1, -1, -1))
        self._index: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages without a user, oldest first

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out now, by evicting idle ones where needed."""
        return len(self._free) + len(self._idle)

    def counts(self) -> L1Counts:
        free, idle = len(self._free), len(self._idle)
        return L1Counts(total=self.total, free=free, in_use=self.total - free - idle, cached=idle)

    def find(self, key: bytes, tokens: Sequence[int]) -> int | None:
        """The cached page of this key; its stored tokens are compared with `tokens` too."""
        page = self._index.get(key)
        if page is None or self._pages[page].tokens != pack_tokens(tokens):
            return None
        return page

    def acquire(self, page: int) -> None:
        """Adds a user to a page that `find` returned; it cannot be evicted until released."""
        state = self._pages[page]
        if state.refs == 0:
            del self._idle[page]
        state.refs += 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages to fill, each with one user, or None (and no change) where fewer are available."""
        if count > self.available:
            return None
        while len(self._free) < count:
            self._evict_oldest()
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._pages[page].refs = 1
        return pages

    def publish(self, page: int, key: bytes, tokens: Sequence[int]) -> int:
        """Makes a full page findable; returns the page to use from now on.

        Where another page already holds the same key and tokens, that one gains a user in this one's stead
        and this one is released, so that equal prefixes keep one copy. A different page under the same key
        (a hash collision) leaves this one private.
        """
        state, packed = self._pages[page], pack_tokens(tokens)
        other = self._index.get(key)
        if other is None:
            state.key, state.tokens = key, packed
            self._index[key] = page
            return page
        if other == page or self._pages[other].tokens != packed:
            return page
        self.acquire(other)
        self.release([page])
        return other

    def release(self, pages: Sequence[int]) -> None:
        """Takes one user off each page, given in prefix order.

        Private pages that lose their last user become free, cached ones idle.
        """
        for page in reversed(pages):
            state = self._pages[page]
            assert state.refs > 0, f"page {page} released more often than acquired"
            state.refs -= 1
            if state.refs:
                continue
            if state.key is None:
                self._free.append(page)
            else:
                self._idle[page] = None

    def check(self) -> None:
        """Raises AssertionError where the bookkeeping contradicts itself."""
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & idle, "a page is both free and cached"
        for number, page in enumerate(self._pages):
            assert (page.refs == 0) == (number in free or number in idle), f"page {number} is lost"
            assert (number in free) <= (page.key is None), f"free page {number} still has a key"
            assert (number in idle) <= (page.key is not None), f"idle page {number} has no key"
            if page.key is not None:
                assert self._index.get(page.key) == number, f"page {number} is not found by its key"
                assert len(page.tokens) == 4 * self.page_size, f"page {number} is cached but not full"
        assert len(self._index) == sum(p.key is not None for p in self._pages), "the index has stale keys"
        counts = self.counts()
        assert counts.free + counts.in_use + counts.cached == counts.total

    def _evict_oldest(self) -> None:
        page, _ = self._idle.popitem(last=False)
        state = self._pages[page]
        assert state.key is not None
        del self._index[state.key]
        self._pages[page] = _Page()
        self._free.append(page)
        self.evictions += 1
