"""L1's bookkeeping: which device page holds what, who uses it, and what may be evicted. No jax, no I/O.

Owner: the engine's thread. A page is free, filling (private to requests that compute it) or cached (full,
found by its key). Cached pages nobody uses stay until their room is needed, least recently used first. A
request uses whole prefixes and gives its pages back deepest first, so that order also evicts leaves before
their parents. Pinned pages are not evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jkv.cache.events import ChangeLog
from jkv.cache.pages import PageInfo, Tier


@dataclass(slots=True)
class _Page:
    refs: int = 0
    info: PageInfo | None = None
    prompt_tokens: int = 0  # both as in Offer
    used: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """A cached page, and what the tiers below decide by whether they want a copy of it."""

    page: int
    info: PageInfo
    prompt_tokens: int  # of the longest prompt that it belongs to
    used: bool  # a request has found it in a cache


@dataclass(frozen=True, kw_only=True)
class L1Counts:
    """Pages by state; `free + in_use + cached == total` always holds."""

    total: int
    free: int
    in_use: int
    cached: int


class L1Pool:
    """Pages `0 .. total - 1` of the device pool and the prefix index over the cached ones.

    `on_evict`, where set, is offered every cached page before its room is given away; `changes` is told of
    every page that can be found from now on, or no more.
    """

    def __init__(self, total: int, page_size: int, changes: ChangeLog | None = None) -> None:
        if total < 1 or page_size < 1:
            raise ValueError(f"an L1 pool needs pages and a page size, got {total} and {page_size}")
        self.total, self.page_size = total, page_size
        self.evictions = 0
        self.on_evict: Callable[[Offer], None] | None = None
        self._changes = changes
        self._index: dict[bytes, int] = {}
        self._pins: set[bytes] = set()
        self.reset()

    def reset(self) -> None:
        """Forgets everything, as after the loss of the device pool; pins stay."""
        if self._changes is not None:
            self._changes.remove_all(Tier.L1, self._index)
        self._pages = [_Page() for _ in range(self.total)]
        self._free = list(range(self.total - 1, -1, -1))
        self._index = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages without a user, oldest first
        self._kept: set[int] = set()  # those of them that are pinned: in `_kept` instead

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out now, by evicting idle ones where needed."""
        return len(self._free) + len(self._idle)

    @property
    def pinned(self) -> int:
        """Cached pages that a pin keeps."""
        return sum(key in self._index for key in self._pins)

    @property
    def cached(self) -> int:
        """Pages that can be found, in use or not."""
        return len(self._index)

    def counts(self) -> L1Counts:
        free, idle = len(self._free), len(self._idle) + len(self._kept)
        return L1Counts(total=self.total, free=free, in_use=self.total - free - idle, cached=idle)

    def find(self, info: PageInfo) -> int | None:
        """The cached page with this identity; tokens are compared, not only the key."""
        page = self._index.get(info.key)
        return None if page is None or self._pages[page].info != info else page

    def get(self, key: bytes) -> tuple[int, PageInfo] | None:
        """The cached page of this key, whatever prompt it is asked for."""
        page = self._index.get(key)
        info = None if page is None else self._pages[page].info
        return None if page is None or info is None else (page, info)

    def acquire(self, page: int) -> None:
        """Adds a user to a page that `find` returned; it cannot be evicted until released."""
        state = self._pages[page]
        if state.refs == 0:
            self._idle.pop(page, None)
            self._kept.discard(page)
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

    def publish(self, page: int, info: PageInfo, prompt_tokens: int) -> int:
        """Makes a full page of a prompt findable; returns the page to use from now on.

        Where another page already holds the same, that one gains a user in this one's stead and this one is
        released, so that equal prefixes keep one copy. A different page under the same key (a hash collision)
        leaves this one private.
        """
        other = self._index.get(info.key)
        if other is None:
            state = self._pages[page]
            state.info, state.prompt_tokens, state.used = info, prompt_tokens, False
            self._index[info.key] = page
            if self._changes is not None:
                self._changes.add(Tier.L1, info.key)
            return page
        if other == page or self._pages[other].info != info:
            return page
        self._pages[other].prompt_tokens = max(self._pages[other].prompt_tokens, prompt_tokens)
        self.acquire(other)
        self.release([page])
        return other

    def note_use(self, info: PageInfo, prompt_tokens: int) -> None:
        """A request with a prompt of this length has found this page in a cache."""
        page = self.find(info)
        if page is not None:
            state = self._pages[page]
            state.prompt_tokens, state.used = max(state.prompt_tokens, prompt_tokens), True

    def offer(self, page: int) -> Offer:
        """What is known of a cached page."""
        state = self._pages[page]
        assert state.info is not None
        return Offer(page, state.info, state.prompt_tokens, state.used)

    def release(self, pages: Sequence[int]) -> None:
        """Takes one user off each page, given in prefix order.

        Private pages that lose their last user become free, cached ones idle.
        """
        for page in reversed(pages):
            state = self._pages[page]
            assert state.refs > 0, f"page {page} released more often than acquired"
            state.refs -= 1
            if state.refs == 0:
                self._rest(page, state)

    def pin(self, key: bytes) -> bool:
        """Exempts the page of this key from eviction, now or once it is cached; whether it is cached now."""
        self._pins.add(key)
        page = self._index.get(key)
        if page is not None and page in self._idle:
            del self._idle[page]
            self._kept.add(page)
        return page is not None

    def unpin(self, key: bytes) -> None:
        self._pins.discard(key)
        page = self._index.get(key)
        if page is not None and page in self._kept:
            self._kept.remove(page)
            self._idle[page] = None

    def unpin_all(self) -> None:
        for key in list(self._pins):
            self.unpin(key)

    def forget(self, key: bytes) -> bool:
        """Takes a page out of the index; whether it was there. Its users, if any, keep it privately."""
        page = self._index.pop(key, None)
        if page is None:
            return False
        if self._changes is not None:
            self._changes.remove(Tier.L1, key)
        self._pages[page].info = None
        if self._pages[page].refs == 0:
            self._idle.pop(page, None)
            self._kept.discard(page)
            self._free.append(page)
        return True

    def held(self) -> Iterator[Offer]:
        """Every page that can be found."""
        return map(self.offer, self._index.values())

    def idle(self) -> list[Offer]:
        """Cached pages that nobody uses and no pin keeps, the next to be evicted first."""
        return [self.offer(page) for page in self._idle]

    def check(self) -> None:
        """Raises AssertionError where the bookkeeping contradicts itself."""
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a page is free twice"
        resting = free | idle | self._kept
        assert len(resting) == len(free) + len(idle) + len(self._kept), "a page is in two states"
        for number, page in enumerate(self._pages):
            assert (page.refs == 0) == (number in resting), f"page {number} is lost"
            assert (number in free) <= (page.info is None), f"free page {number} can still be found"
            assert (number in idle | self._kept) <= (page.info is not None), f"idle page {number} has no key"
            if page.info is not None:
                assert self._index.get(page.info.key) == number, f"page {number} is not found by its key"
                assert len(page.info.tokens) == 4 * self.page_size, f"page {number} is cached but not full"
                assert number not in self._kept or page.info.key in self._pins, f"no pin keeps page {number}"
        assert len(self._index) == sum(p.info is not None for p in self._pages), "the index has stale keys"
        counts = self.counts()
        assert counts.free + counts.in_use + counts.cached == counts.total

    def _rest(self, page: int, state: _Page) -> None:
        if state.info is None:
            self._free.append(page)
        elif state.info.key in self._pins:
            self._kept.add(page)
        else:
            self._idle[page] = None

    def _evict_oldest(self) -> None:
        page, _ = self._idle.popitem(last=False)
        info = self._pages[page].info
        assert info is not None
        if self.on_evict is not None:
            self.on_evict(self.offer(page))
        if self._changes is not None:
            self._changes.remove(Tier.L1, info.key)
        del self._index[info.key]
        self._pages[page] = _Page()
        self._free.append(page)
        self.evictions += 1
