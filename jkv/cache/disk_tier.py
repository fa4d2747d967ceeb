"""L3's bookkeeping: which pages the store holds, whose they are, and what goes to make room. No jax.

Owner: the engine's thread. The store's own threads read and write, and know nothing of this.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jkv.cache.events import ChangeLog
from jkv.cache.l3.listing import Listing
from jkv.cache.l3.names import StoredPage
from jkv.cache.l3.reasons import Reason
from jkv.cache.l3.store import ReadOutcome, WriteOutcome
from jkv.cache.page_codec import PageCodec
from jkv.cache.page_tree import PageTree
from jkv.cache.pages import PageInfo, Tier
from jkv.cache.replica import StorePlace

# Outcomes that speak against the store's health; the others are about one page, or about ourselves.
_FAULTS = frozenset({Reason.IO, Reason.NO_SPACE, Reason.READ_ONLY, Reason.TIMEOUT})
# What is wrong with the bytes of a page, wherever it is read again.
_BAD = frozenset({Reason.SIZE, Reason.CORRUPT, Reason.MISMATCH, Reason.VERSION})
_PAGES_FAULT = _BAD | {Reason.MISSING}


class Store(Protocol):
    """`jkv.cache.l3.store.PageStore`, or what stands for it where there is nothing to keep."""

    @property
    def owner(self) -> str: ...
    @property
    def page_cost(self) -> int: ...
    @property
    def overhead_bytes(self) -> int: ...
    def read(
        self, page: StoredPage, info: PageInfo, done: Callable[[ReadOutcome], None]
    ) -> Callable[[], None]: ...
    def write(
        self, info: PageInfo, data: Callable[[], np.ndarray], done: Callable[[WriteOutcome], None]
    ) -> None: ...
    def delete(self, page: StoredPage, done: Callable[[bool], None] | None) -> None: ...
    def quarantine(self, page: StoredPage, done: Callable[[bool], None] | None) -> None: ...
    def save_recency(self, keys: Iterable[bytes]) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Own:
    stored: StoredPage | None  # None while it is being written
    below: StoredPage | None = None  # an older file of this name, which could not be deleted


class DiskTier:
    """Pages that this engine wrote, as many as `capacity_bytes` hold on disk, and those of others to read.

    A page counts from the moment its write starts; it is found once the write has been published. Pages of
    other models under the same owner only take room and go first; pages that could not be deleted take room
    until they can.
    `post` has a function called on the engine's thread; `changes` is told what can be read from now on, or no
    more, and `on_own`, where set, which pages this engine has. `place` says where the store is.
    """

    def __init__(
        self,
        store: Store,
        listing: Listing,
        capacity_bytes: int,
        codec: PageCodec,
        post: Callable[[Callable[[], None]], None],
        changes: ChangeLog | None = None,
        place: StorePlace | None = None,
    ) -> None:
        self.place = place
        self.on_own: Callable[[bytes, bool], None] | None = None
        self.store, self.codec, self._post, self._changes = store, codec, post, changes
        self.errors: Counter[str] = Counter()
        self.quarantined = 0
        self.capacity_bytes = capacity_bytes
        self._deleting: dict[int, None] = {}  # numbers of deletions under way, in order
        self._deletions = 0
        self._when_deleted: deque[tuple[int, Callable[[], None]]] = deque()  # after those up to a number
        self._budget = max(0, capacity_bytes - store.overhead_bytes)
        self._stale = deque(listing.stale)
        self._undeleted: dict[bytes, StoredPage] = {}
        self._trying: StoredPage | None = None  # to delete one of them again
        self._stale_bytes = sum(page.cost for page in self._stale)
        self.tree: PageTree[_Own] = PageTree(0)
        self._foreign: dict[bytes, StoredPage] = {}
        while self._stale and len(listing.own) * store.page_cost > self._budget - self._stale_bytes:
            self._drop_stale()
        self._resize()
        self._take_over(listing.own)
        self.set_foreign(listing.foreign)

    def __len__(self) -> int:
        return len(self.tree)

    @property
    def capacity(self) -> int:
        """The most pages this engine keeps."""
        return self.tree.capacity

    @property
    def bytes(self) -> int:
        """What this engine's pages take on disk, those of other models included."""
        return (len(self.tree) + len(self._undeleted)) * self.store.page_cost + self._stale_bytes

    @property
    def foreign(self) -> int:
        """Pages of other owners."""
        return len(self._foreign)

    def set_foreign(self, pages: Iterable[StoredPage]) -> None:
        """The pages of other owners, as just listed."""
        before, self._foreign = self._foreign, {p.key: p for p in pages}
        for key in before.keys() ^ self._foreign.keys():
            self._report(key)

    def readable(self) -> list[bytes]:
        """Keys of all pages that can be read, this engine's and others'."""
        return [*{page.key for page in self.own_pages()} | self._foreign.keys()]

    def find(self, info: PageInfo) -> StoredPage | None:
        """A published page that should have this identity; reading it tells."""
        own = self.tree.get(info.key)
        stored = own.stored if own is not None and own.stored is not None else self._foreign.get(info.key)
        if stored is None or stored.parent != info.parent or stored.salt_tag != info.salt_tag:
            return None
        return stored

    def has(self, info: PageInfo) -> bool:
        """Whether it need not be written: it is there, or being written."""
        return info.key in self.tree or self.find(info) is not None

    def touch(self, keys: Iterable[bytes]) -> None:
        self.tree.touch(keys)

    def reserve(self, info: PageInfo) -> bool:
        """Makes room for a page about to be written; False where there is none."""
        if info.key in self.tree:
            return False
        below = self._undeleted.pop(info.key, None)
        self._resize()
        while self._stale and len(self.tree) >= self.tree.capacity:
            self._drop_stale()
            self._resize()
        self._try_again_to_delete()
        evicted = self.tree.add(info.key, info.parent, _Own(None, below))
        if evicted is None:
            self._keep_undeleted(below)
            return False
        self.tree.hold(info.key)
        self._deleted_from_tree(own for _, own in evicted)
        return True

    def written(self, info: PageInfo, outcome: WriteOutcome) -> bool:
        """Takes the outcome of a write that `reserve` made room for; whether the page is published."""
        own = self.tree.get(info.key)
        assert own is not None
        self.tree.release(info.key)
        if outcome.reason is None:
            own.stored, own.below = outcome.page, None
            self._report(info.key)
            self._resize()  # what was there could not be deleted meanwhile
            return info.key in self.tree
        self.errors[f"write_{outcome.reason.value}"] += 1
        self.tree.remove(info.key)
        self._keep_undeleted(own.below)
        return False

    def unreadable(self, page: StoredPage, reason: Reason) -> None:
        """Takes note of a read that failed: a page that is bad or gone is not found again."""
        if reason in (Reason.CANCELLED, Reason.CLOSED):
            return
        if reason in _PAGES_FAULT and not self._knows(page):
            return  # it was evicted while its read was under way, and perhaps written again
        self.errors[f"read_{reason.value}"] += 1
        if reason not in _PAGES_FAULT:
            return
        self._forget(page)
        if reason in _BAD:
            self.quarantined += 1
            self._quarantine(page)

    def remove(self, key: bytes) -> bool:
        """Deletes a page of this engine; False where it has none, or is just writing it."""
        own = self.tree.get(key)
        if own is None or own.stored is None:
            return False
        self._deleted_from_tree([self.tree.remove(key)])
        return True

    def when_deleted(self, done: Callable[[], None]) -> None:
        """Has `done` called once what is to be deleted by now is gone from the store, or could not be."""
        self._when_deleted.append((self._deletions, done))
        self._settle()

    def own_pages(self) -> list[StoredPage]:
        """This engine's published pages, oldest first."""
        every = (self.tree.get(key) for key in self.tree.keys_oldest_first())
        return [own.stored for own in every if own is not None and own.stored is not None]

    def close(self) -> None:
        """Saves the order of use, then waits for what the store still does."""
        self.store.save_recency(page.key for page in self.own_pages())
        self.store.close()

    def _take_over(self, pages: Iterable[StoredPage]) -> None:
        for page in pages:
            evicted = None
            if page.key not in self.tree:
                # Names are not verified: keys that cannot be hashes of their parents are no pages.
                with contextlib.suppress(ValueError):
                    evicted = self.tree.add(page.key, page.parent, _Own(page))
            if evicted is None:
                self._delete(page)
                continue
            self._report(page.key)
            self._deleted_from_tree(own for _, own in evicted)

    def _knows(self, page: StoredPage) -> bool:
        own = self.tree.get(page.key)
        # The very object: what was written after it has another one that is equal.
        return (own is not None and own.stored is page) or self._foreign.get(page.key) == page

    def _forget(self, page: StoredPage) -> None:
        own = self.tree.get(page.key)
        if own is not None and own.stored is page:
            self.tree.remove(page.key)
        if self._foreign.get(page.key) == page:
            del self._foreign[page.key]
        self._report(page.key)

    def _report(self, key: bytes) -> None:
        own = self.tree.get(key)
        mine = own is not None and own.stored is not None
        if self.on_own is not None:
            self.on_own(key, mine)
        if self._changes is None:
            return
        if mine or key in self._foreign:
            self._changes.add(Tier.L3, key)
        else:
            self._changes.remove(Tier.L3, key)

    def _deleted_from_tree(self, gone: Iterable[_Own]) -> None:
        for own in gone:
            if own.stored is not None:
                self._report(own.stored.key)
                self._delete(own.stored)

    def _delete(self, page: StoredPage) -> None:
        self.store.delete(page, self._start_deletion(page))

    def _quarantine(self, page: StoredPage) -> None:
        if page.owner != self.store.owner:
            self.store.quarantine(page, None)
            return
        self.store.quarantine(page, self._start_deletion(page))

    def _start_deletion(self, page: StoredPage) -> Callable[[bool], None]:
        """What a thread of the store is to call at its end."""
        self._deletions += 1
        number = self._deletions
        self._deleting[number] = None
        return lambda freed: self._post(lambda: self._deleted(page, number, freed))

    def _deleted(self, page: StoredPage, number: int, freed: bool) -> None:
        del self._deleting[number]
        if page == self._trying:
            self._trying = None
            self._undeleted.pop(page.key, None)
        own = self.tree.get(page.key)
        if own is None:
            self._keep_undeleted(None if freed else page)
        elif own.stored is None:
            own.below = None if freed else page
        self._settle()

    def _keep_undeleted(self, page: StoredPage | None) -> None:
        if page is not None:
            self._undeleted[page.key] = page
        self._resize()

    def _settle(self) -> None:
        first = next(iter(self._deleting), self._deletions + 1)
        while self._when_deleted and self._when_deleted[0][0] < first:
            self._when_deleted.popleft()[1]()

    def _drop_stale(self) -> None:
        page = self._stale.popleft()
        self._stale_bytes -= page.cost
        self._delete(page.page)

    def _try_again_to_delete(self) -> None:
        """One page at a time. Its room counts as taken until it is gone, or a store that deletes nothing
        would grow without end.
        """
        if self._undeleted and self._trying is None:
            self._trying = next(iter(self._undeleted.values()))
            self._delete(self._trying)

    def _resize(self) -> None:
        pages = max(0, self._budget - self._stale_bytes) // self.store.page_cost
        self.tree.capacity = max(0, pages - len(self._undeleted))
        self._deleted_from_tree(own for _, own in self.tree.evict(len(self.tree) - self.tree.capacity))


def is_fault(reason: Reason | None) -> bool:
    """Whether an outcome speaks against the store's health."""
    return reason in _FAULTS
