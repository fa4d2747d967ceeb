"""Bringing pages up: from L3 into L2 by the store's threads, and the terms on which L1 gets them. No jax.

Owner: the engine's thread. Outcomes of reads come back through `post`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from jkv.cache.breaker import BreakerState
from jkv.cache.l3.reasons import Reason
from jkv.cache.l3.store import ReadOutcome
from jkv.cache.load import L2Page, Load, PageState
from jkv.cache.lookup import TierLookup, tell
from jkv.cache.pages import PEER, PageInfo, Source, Tier
from jkv.cache.peers import PeerHint
from jkv.cache.speed import Speed

_log = logging.getLogger(__name__)

# A load that is slower than computing is given up; this much is forgiven, for estimates are rough.
_PATIENCE = 2.0
_PATIENCE_S = 0.25
# Pages of one call to a peer.
_FETCH_PAGES = 64


@dataclass(frozen=True)
class _BurstEnd:
    pages: int
    bytes: int
    seconds: float


class _Burst:
    """Measures reads from the first of several at a time until the last."""

    def __init__(self) -> None:
        self._open = self._pages = self._bytes = 0
        self._start = 0.0

    def started(self, now: float) -> None:
        if not self._open:
            self._pages, self._bytes, self._start = 0, 0, now
        self._open += 1

    def ended(self, data: np.ndarray | None, now: float) -> _BurstEnd | None:
        """What was read since the first start, once nothing is under way any more."""
        self._open -= 1
        if data is not None:
            self._pages, self._bytes = self._pages + 1, self._bytes + data.nbytes
        return None if self._open else _BurstEnd(self._pages, self._bytes, now - self._start)


class Loading(TierLookup):
    """The half of the lower tiers that reads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.read_speed = Speed()  # bytes of L3
        self._reads = _Burst()
        self._promised = 0  # pages of L2 held until they are written; see Saving
        self._rising: set[bytes] = set()  # keys of pages that are to be copied up before the next step

    def begin(
        self,
        infos: Sequence[PageInfo],
        *,
        cached: Sequence[Tier] | None = None,
        count_misses: bool = True,
        peer: PeerHint | None = None,
    ) -> Load | None:
        """Starts reading what only L3 has of a prompt, then what only the peer has; None where there is
        nothing to bring. `cached` is what the method of that name has just said of it, if the caller asked.
        """
        tiers = self.cached(infos) if cached is None else cached
        self._touch(infos[: len(tiers)])
        if count_misses:
            self._count_misses(len(infos) - len(tiers), Tier)
        end = self._gated(tiers) if self.policy.load == "auto" else len(tiers)
        load = Load(infos, end, local_end=end)
        theirs = 0 if peer is None or end < len(tiers) else min(peer.pages, len(infos))
        if peer is not None and theirs > end and self._worth_fetching(peer, theirs - end):
            load.peer, load.end = peer, theirs
        elif all(tier is Tier.L1 for tier in tiers[:end]):
            return None
        self._pump(load, queued=True)
        return load

    def state(self, load: Load, number: int, *, queued: bool = False) -> PageState:
        """Where page `number`, which L1 lacks, is; starts to read it if it can be read. `queued` loads leave
        room to those of running requests, which take their pages as they come.
        """
        if number >= load.end:
            return PageState.ABSENT
        page = load.held.get(number) or self.host.find(load.infos[number])
        if page is None:
            load.next = min(load.next, number)
            self._pump(load, queued=queued)
            page = load.held.get(number)
        if page.failed if page is not None else not self._waits_for_room(load, number, queued):
            load.end = number
            return PageState.ABSENT
        if page is not None and page.payload is not None:
            return PageState.READY
        now = self._clock()
        if load.late_at is None:
            load.late_at = now + self._patience(load.end - number)
        if now < load.late_at:
            return PageState.COMING
        self.counts.late_loads += 1
        if page is not None:
            self._note_late(load, page)
        load.end = number
        return PageState.ABSENT

    def take(self, load: Load, number: int) -> tuple[Any, Source]:
        """The payload of a page that is ready, and where it came from. The caller copies it to L1 before
        anything else is dispatched.
        """
        held = load.held.pop(number, None)
        page = held or self.host.find(load.infos[number])
        assert page is not None
        payload = page.payload
        self._rising.add(page.info.key)
        if held is None:
            self.counts.by_tier[Tier.L2].loads += 1
            return payload, Tier.L2
        self.host.release(held)
        return payload, PEER if held.fetched else Tier.L3

    def settled(self, load: Load) -> bool:
        """Whether nothing of it is on its way any more. Whoever asks waits: this starts the time it has."""
        number = next((n for n, p in load.held.items() if n < load.end and p.payload is None), None)
        if number is None and not load.held:
            number = load.next  # where reading stopped for want of room, or the end
        return number is None or self.state(load, number, queued=True) is not PageState.COMING

    def started(self, load: Load) -> bool:
        """Whether something of it has been read already."""
        return any(page.payload is not None for page in load.held.values())

    def end(self, load: Load) -> None:
        """Gives back what the load still holds; reads that nobody else waits for are cancelled."""
        for page in load.held.values():
            cancel = page.cancel
            if page.holds == 2 and cancel is not None:  # this load and the read
                page.cancel = None
                cancel()
            self.host.release(page)
        load.held.clear()
        load.end = 0

    def _gated(self, tiers: Sequence[Tier]) -> int:
        """Where to stop loading, for computing the rest is faster."""
        for tier in (Tier.L3, Tier.L2):
            pages = tiers.count(tier)
            if pages and not self.gate.worth_loading(tier, pages):
                tiers = tiers[: tiers.index(tier)]
        return len(tiers)

    def _patience(self, pages: int) -> float:
        if self.policy.load != "auto":
            return self.policy.load_timeout_s
        speed = self.gate.prefill_tokens_per_s
        if not speed:
            return self.policy.load_timeout_s
        computing = pages * self.pool.page_size / speed
        return min(self.policy.load_timeout_s, _PATIENCE * computing + _PATIENCE_S)

    def _note_late(self, load: Load, page: L2Page) -> None:
        """Who was to bring it has failed: that it ends will be heard of too late, or as a cancellation."""
        if page.fetched:
            if self.peers is not None and load.peer is not None:
                self.peers.note_late(load.peer.address)
        elif self.disk is not None:
            self.disk.errors[f"read_{Reason.LATE.value}"] += 1
            self.reading.failed()

    def _pump(self, load: Load, *, queued: bool) -> None:
        """Starts reads in order, as far as L2 has room for them."""
        while load.next < load.end:
            info = load.infos[load.next]
            page = self.host.find(info)
            if self.pool.find(info) is None and (page is None or page.payload is None):
                if page is None and load.next >= load.local_end:
                    if self._fetch(load, queued):
                        continue
                    return
                if page is None:
                    page = self._read(info, queued)
                if page is None:
                    return
                if load.next not in load.held:
                    self.host.hold(page)
                    load.held[load.next] = page
            load.next += 1

    def _read(self, info: PageInfo, queued: bool) -> L2Page | None:
        if self.disk is None or self.disk.find(info) is None or self._loads_hold_enough(queued):
            return None
        page = self._place(info, None, through=True) if self.reading.allows() else None
        if page is not None:
            self.host.hold(page)  # for the read itself
            self._start_read(page)
        return page

    def _worth_fetching(self, peer: PeerHint, pages: int) -> bool:
        if self.peers is None or not self.peers.allows(peer.address):
            return False
        return self.policy.load != "auto" or self.gate.worth_loading(PEER, pages)

    def _fetch(self, load: Load, queued: bool) -> bool:
        """Starts to fetch the pages that follow from the load's peer, as many as L2 has room for."""
        assert self.peers is not None
        assert load.peer is not None
        pages: deque[L2Page] = deque()
        while load.next < load.end and len(pages) < _FETCH_PAGES and not self._loads_hold_enough(queued):
            info = load.infos[load.next]
            there = self.pool.find(info) is not None or self.host.find(info) is not None
            page = None if there else self._place(info, None, through=False)
            if page is None:
                break
            self.host.hold(page)  # for the fetch
            self.host.hold(page)
            load.held[load.next] = page
            page.fetched = True
            pages.append(page)
            load.next += 1
        if not pages:
            return False
        started, count = self._clock(), len(pages)
        cancel = self.peers.fetch(
            load.peer.address,
            [page.info for page in pages],
            lambda payload: self._fetched(pages.popleft(), payload),
            lambda: self._fetch_ended(pages, count, started),
        )
        unwanted: set[L2Page] = set()

        def give_up(page: L2Page) -> None:
            unwanted.add(page)
            if unwanted.issuperset(pages):  # all that is yet to come
                cancel()

        for page in pages:
            page.cancel = partial(give_up, page)
        return True

    def _fetched(self, page: L2Page, payload: Any) -> None:
        page.cancel = None
        self.host.arrived(page, payload)
        self.host.release(page)

    def _fetch_ended(self, missing: Sequence[L2Page], count: int, started: float) -> None:
        """Those that have not come will not."""
        for page in missing:
            self._fetched(page, None)
        if count > len(missing):
            self.gate.record_load(PEER, count - len(missing), self._clock() - started)

    def _start_read(self, page: L2Page) -> None:
        assert self.disk is not None
        stored = self.disk.find(page.info)
        assert stored is not None
        self._reads.started(self._clock())
        page.cancel = self.disk.store.read(stored, page.info, lambda outcome: self._deliver(page, outcome))

    def _loads_may_hold(self, *, queued: bool) -> int:
        """The rest of L2 is for saving."""
        return self.host.tree.capacity * (2 if queued else 3) // 4 + 1

    def _loads_hold_enough(self, queued: bool) -> bool:
        return self.host.held - self._promised >= self._loads_may_hold(queued=queued)

    def _waits_for_room(self, load: Load, number: int, queued: bool) -> bool:
        """Whether a page would be read if other loads did not hold so many. Queued ones may have to wait
        until this one has ended: it waits neither where the rest of L2 is nothing, nor while it holds pages.
        """
        there = self.disk is not None and self.disk.find(load.infos[number]) is not None
        waits = queued or self._loads_may_hold(queued=False) > self._loads_may_hold(queued=True)
        full = self._loads_hold_enough(queued) and not load.held
        return there and waits and full and self.reading.state is BreakerState.CLOSED

    def _deliver(self, page: L2Page, outcome: ReadOutcome) -> None:
        """On a thread of the store: makes the bytes a page and hands it over."""
        assert self.disk is not None
        try:
            payload = None if outcome.data is None else self.disk.codec.page_from_bytes(outcome.data)
        except Exception:
            _log.exception("a page read from L3 could not be put into host memory")
            payload = None
        self._post(lambda: self._arrived(page, payload, outcome))

    def _arrived(self, page: L2Page, payload: Any | None, outcome: ReadOutcome) -> None:
        assert self.disk is not None
        burst = self._reads.ended(outcome.data, self._clock())
        if outcome.reason is Reason.CANCELLED and page.holds > 1 and self.disk.find(page.info) is not None:
            self._start_read(page)  # somebody has come for it since
            return
        page.cancel = None
        self.host.arrived(page, payload)
        if outcome.reason is not None:
            self.disk.unreadable(outcome.page, outcome.reason)
        elif payload is not None:
            self.counts.by_tier[Tier.L3].loads += 1
        if burst is not None and burst.pages:
            self.gate.record_load(Tier.L3, burst.pages, burst.seconds)
            self.read_speed.record(burst.bytes, burst.seconds)
        tell(self.reading, outcome.reason)
        self.host.release(page)

    def _place(self, info: PageInfo, payload: Any | None, through: bool) -> L2Page | None:
        """Adds a page to L2. One on its way through, from or to L3, may take the room of a page above it that
        no pin keeps, where L2 is full of these, if L3 has that page as well: so prompts longer than L2 pass.
        """
        page = self.host.add(info, payload)
        if page is not None or not through or self.disk is None or info.key in self.host.tree:
            return page
        above = self.host.tree.get(info.parent)
        while above is not None and not self._may_give_way(above):
            above = self.host.tree.get(above.info.parent)
        if above is None:
            return None
        self.host.drop(above)
        self.host.tree.evictions += 1
        return self.host.add(info, payload)

    def _may_give_way(self, page: L2Page) -> bool:
        assert self.disk is not None
        kept = page.holds or self.host.tree.is_pinned(page.info.key)
        return not kept and self.disk.find(page.info) is not None
