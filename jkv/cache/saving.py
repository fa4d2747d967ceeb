"""Sending pages down: which go to L2, which on to L3, and in what order. No jax.

Owner: the engine's thread. Outcomes of writes come back through `post`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from jkv.cache.l1 import Offer
from jkv.cache.l3.store import WriteOutcome
from jkv.cache.load import L2Page
from jkv.cache.loading import Loading
from jkv.cache.lookup import tell
from jkv.cache.pages import PageInfo, Tier
from jkv.cache.speed import Speed

_log = logging.getLogger(__name__)

# Enough writes under way to keep the store's threads busy; more would only hold memory.
_WRITES = 4
# Keys that `second-use` remembers to have seen once, per page that L3 can hold.
_SEEN_PER_PAGE = 4


class Saving(Loading):
    """The half of the lower tiers that writes; what it reads, Loading has brought."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.write_speed = Speed()  # bytes of L3
        self.leaving: list[Offer] = []  # pages that L1 gave up and that are to be copied before the next step
        self._backlog: deque[L2Page] = deque()
        self._writing = 0
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._unwritten: dict[L2Page, int] = {}  # on its way to L3, in order: numbers as they were queued
        self._queued = 0
        self._drained: list[tuple[int, Callable[[], None]]] = []  # after the write of that number
        self._write_back = self.policy.write == "write-back"
        if self._write_back:
            self.pool.on_evict = self.leaving.append
            self.host.on_lost = self._drop

    @property
    def pending_writes(self) -> int:
        """Pages that are yet to be published in L3."""
        return len(self._unwritten)

    def choose(self, offers: Iterable[Offer]) -> list[Offer]:
        """Those of the offered pages, which have just become full or been used, that are to be copied to L2
        now.
        """
        chosen: dict[bytes, Offer] = {}
        for offer in map(self._noted, offers):
            if not self._below(offer) and self._goes_down(offer):
                chosen[offer.info.key] = offer
        return list(chosen.values())

    def take_leaving(self) -> list[Offer]:
        """Pages that L1 has just evicted and that no lower tier holds: to be copied before the next step. But
        for those that were to come up before it, too: what is in their place is not they.
        """
        leaving = [o for o in self.leaving if o.info.key not in self._rising]
        self.leaving.clear()
        self._rising.clear()
        return [o for o in leaving if not self._below(o) and (self.host.keep or self.admits(o))]

    def saved(self, offer: Offer, payload: Any) -> L2Page | None:
        """Takes a page's copy into L2, and on to L3 as the policy says; None where L2 has no room."""
        through = self.admits(offer) and not self._waits_in_l2
        page = self._place(offer.info, payload, through) if through or self._follows(offer.info) else None
        if page is None:
            self.counts.by_tier[Tier.L2 if self.host.keep else Tier.L3].drops += 1
            return None
        self.counts.by_tier[Tier.L2].stores += 1
        if self.admits(offer):
            self._send_on(page)
        if not self.host.keep and not page.holds and not page.failed:
            self.host.drop(page)
        return page

    def admits(self, offer: Offer) -> bool:
        """Whether L3 is to have the page, by the policy."""
        if self.disk is None or offer.prompt_tokens < self.policy.l3_min_tokens:
            return False
        return self.policy.l3_admission == "always" or offer.used

    def flush_dirty(self) -> None:
        """Queues for L3 all that only L2 holds, as before a stop."""
        while self.host.dirty:
            self._queue(self.host.dirty.popitem(last=False)[1])

    def store_all(self) -> None:
        """Queues for L3 every page of L2 that it lacks."""
        for page in self.host.pages():
            if page.payload is not None and self.disk is not None and not self.disk.has(page.info):
                self._queue(page)

    def when_drained(self, done: Callable[[], None]) -> None:
        """Has `done` called once every write that is wanted now is published or has failed."""
        self.flush_dirty()
        self._drained.append((self._queued, done))
        self._settle()

    def _follows(self, info: PageInfo) -> bool:
        """Whether the page can be found again below L1: the one before it is there. Under write-back L1 gives
        up leaves first, and the one before it is to follow.
        """
        if self._write_back or info.parent == info.root or info.parent in self.host.tree:
            return True
        return self.disk is not None and info.parent in self.disk.tree

    def _noted(self, offer: Offer) -> Offer:
        """Remembers that a page was seen, where its second use decides: one seen before counts as used."""
        if self.disk is None or self.policy.l3_admission != "second-use":
            return offer
        if offer.info.key in self._seen:
            self.pool.note_use(offer.info, offer.prompt_tokens)
            return replace(offer, used=True)
        self._seen[offer.info.key] = None
        if len(self._seen) > _SEEN_PER_PAGE * max(self.disk.capacity, 1024):
            self._seen.popitem(last=False)
        return offer

    def _below(self, offer: Offer) -> bool:
        """Whether a lower tier has the page; if only L2 has, it may be L3's turn."""
        page = self.host.find(offer.info)
        if page is None:
            return self.disk is not None and self.disk.has(offer.info)
        if page.payload is not None and offer.used and self.admits(offer):
            self._send_on(page)
        return True

    def _goes_down(self, offer: Offer) -> bool:
        if self._write_back or (self.policy.write == "write-through-selective" and not offer.used):
            return False
        return self.host.keep or self.admits(offer)

    @property
    def _waits_in_l2(self) -> bool:
        """Whether what is for L3 goes there only when L2 gives it up."""
        return self._write_back and self.host.keep

    def _send_on(self, page: L2Page) -> None:
        """Sends a page of L2 to L3, now or when L2 gives it up."""
        assert self.disk is not None
        if not self._waits_in_l2:
            self._queue(page)
        elif page not in self._unwritten and not self.disk.has(page.info):
            self.host.dirty[page.info.key] = page
            self._clean()

    def _queue(self, page: L2Page) -> None:
        assert self.disk is not None
        if page in self._unwritten or self.disk.has(page.info):
            return
        self._queued += 1
        self._unwritten[page] = self._queued
        # More would leave L2 no room for what comes: those may go before their turn to be written.
        if not self.host.keep or self._promised < self.host.tree.capacity // 2:
            self._promise(page)
        self._backlog.append(page)
        if len(self._backlog) > 2 * self.host.tree.capacity:
            self._drop_evicted()
        self._write_some()

    def _write_some(self) -> None:
        assert self.disk is not None
        while self._backlog and self._writing < _WRITES:
            page = self._backlog.popleft()
            if page.failed or not self.writing.allows() or not self.disk.reserve(page.info):
                self._unqueue(page)
                self._drop(page)
                continue
            if not page.promised:
                self._promise(page)
            self._writing += 1
            self.disk.store.write(
                page.info,
                partial(self.disk.codec.page_to_bytes, page.payload),
                partial(self._after_write, page),
            )

    def _drop_evicted(self) -> None:
        """Takes out what L2 has given up meanwhile: a store that hangs would let it gather without end."""
        evicted = [page for page in self._backlog if page.failed]
        self._backlog = deque(page for page in self._backlog if not page.failed)
        for page in evicted:
            self._unqueue(page)
            self._drop(page)

    def _after_write(self, page: L2Page, outcome: WriteOutcome) -> None:
        """On a thread of the store."""
        self._post(lambda: self._written(page, outcome))

    def _written(self, page: L2Page, outcome: WriteOutcome) -> None:
        assert self.disk is not None
        self._writing -= 1
        if self.disk.written(page.info, outcome):
            self.counts.by_tier[Tier.L3].stores += 1
            self.write_speed.record(outcome.bytes, outcome.seconds)
        else:
            self._drop(page)
        tell(self.writing, outcome.reason)
        self._unqueue(page)
        self._write_some()
        self._settle()

    def _promise(self, page: L2Page) -> None:
        """Keeps a page in L2 until it is written."""
        page.promised = True
        self._promised += 1
        self.host.hold(page)

    def _unqueue(self, page: L2Page) -> None:
        del self._unwritten[page]
        if page.promised:
            page.promised = False
            self._promised -= 1
            self.host.release(page)

    def _drop(self, page: L2Page) -> None:
        self.counts.by_tier[Tier.L3].drops += 1
        _log.debug("page %s is not written to L3", page.info.key.hex())

    def _clean(self) -> None:
        """Writes ahead what would otherwise be lost when L2 evicts it."""
        while self.host.dirty and len(self.host.tree) * 4 >= self.host.tree.capacity * 3:
            if self.pending_writes >= max(1, self.host.tree.capacity // 4):
                return
            self._queue(self.host.dirty.popitem(last=False)[1])

    def _settle(self) -> None:
        first = next(iter(self._unwritten.values()), self._queued + 1)
        while self._drained and self._drained[0][0] < first:
            self._drained.pop(0)[1]()
