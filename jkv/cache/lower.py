"""The tiers below the device: what they hold of a prompt, and what moves up and down. No jax.

Owner: the engine's thread. Reads and writes of L3 run on the store's threads, and their outcomes come back
through `post`, which has a function called on the engine's thread. Copies between L1 and L2 are dispatched
by the engine: it asks here what to copy, and tells when it has.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from jkv.cache.breaker import Breaker, BreakerState
from jkv.cache.disk_tier import DiskTier, is_fault
from jkv.cache.gate import CostGate
from jkv.cache.host_tier import HostTier
from jkv.cache.l1 import L1Pool
from jkv.cache.l3.reasons import Reason
from jkv.cache.l3.store import ReadOutcome, WriteOutcome
from jkv.cache.load import HostPage, Load, PageState
from jkv.cache.page_tree import PageTree
from jkv.cache.pages import PageInfo, Tier
from jkv.cache.speed import Speed
from jkv.errors import FailedPreconditionError

_log = logging.getLogger(__name__)

# Enough writes under way to keep the store's threads busy; more would only hold memory.
_WRITES = 4
# Keys that `second-use` remembers to have seen once, per page that L3 can hold.
_SEEN_PER_PAGE = 4
# A load that is slower than computing is given up; this much is forgiven, for estimates are rough.
_PATIENCE = 2.0
_PATIENCE_S = 0.25


_ABOVE = {Tier.L1: (), Tier.L2: (Tier.L1,), Tier.L3: (Tier.L1, Tier.L2)}


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When pages go down, and when they are worth bringing up (the flags of the same names)."""

    write: str = "write-through"
    load: str = "auto"
    load_timeout_s: float = 30.0
    l3_min_tokens: int = 0
    l3_admission: str = "always"


@dataclass(frozen=True, slots=True)
class Offer:
    """A page of L1 that has just become full, or that a request has just used again."""

    page: int
    info: PageInfo
    prompt_tokens: int
    used: bool


@dataclass(kw_only=True)
class TierCounts:
    """Totals since the start, in pages but for `hit_tokens`."""

    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    loads: int = 0
    stores: int = 0
    drops: int = 0


@dataclass(kw_only=True)
class _Counts:
    by_tier: dict[Tier, TierCounts] = field(default_factory=lambda: {t: TierCounts() for t in Tier})
    late_loads: int = 0


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


class LowerTiers:
    """L2 and L3 beneath an L1 pool."""

    def __init__(
        self,
        pool: L1Pool,
        host: HostTier,
        disk: DiskTier | None,
        *,
        gate: CostGate,
        policy: Policy,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool, self.host, self.disk = pool, host, disk
        self.gate, self.policy = gate, policy
        # Reading goes on where a full or read-only disk refuses writes.
        self.reading, self.writing = Breaker(clock), Breaker(clock)
        self.read_speed, self.write_speed = Speed(), Speed()  # bytes of L3
        self.counts = _Counts()
        self.leaving: list[Offer] = []  # pages that L1 gave up and that are to be copied before the next step
        self._post, self._clock = post, clock
        self._backlog: deque[HostPage] = deque()
        self._writing = 0
        self._promised = 0  # pages held in L2 until they are written; the backlog may be longer
        self._reads = _Burst()
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._pins: dict[bytes, float] = {}  # until when, by the clock
        self._unwritten: dict[HostPage, int] = {}  # on its way to L3, in order: numbers as they were queued
        self._queued = 0
        self._drained: list[tuple[int, Callable[[], None]]] = []  # after the write of that number
        self._write_back = policy.write == "write-back"
        if self._write_back:
            pool.on_evict = lambda page, info: self.leaving.append(Offer(page, info, 0, used=True))

    @classmethod
    def none(cls, pool: L1Pool) -> LowerTiers:
        """Nothing below L1."""

        gate = CostGate(page_size=pool.page_size, clock=time.monotonic)
        host = HostTier(0, keep=False)
        return cls(pool, host, None, gate=gate, policy=Policy(), post=lambda call: call())

    @property
    def off(self) -> bool:
        """Whether there is no tier below L1."""
        return self.host.tree.capacity == 0

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Those that are on, L1 among them."""
        on = {Tier.L1: True, Tier.L2: self.host.keep, Tier.L3: self.disk is not None}
        return tuple(tier for tier in Tier if on[tier])

    @property
    def pending_writes(self) -> int:
        """Pages that are yet to be published in L3."""
        return len(self._unwritten)

    # Loading

    def begin(self, infos: Sequence[PageInfo], *, count_misses: bool = True) -> Load | None:
        """Looks a prompt up and starts reading what only L3 has; None where the lower tiers have nothing."""
        end, first = self._longest(infos)
        self._touch(infos[:end])
        if count_misses:
            self._count_misses(len(infos) - end, Tier)
        if self.policy.load == "auto":
            end = self._gated(infos, end, first)
        if not first or min(first.values()) >= end:
            return None
        load = Load(infos, end)
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
        if page.failed if page is not None else not self._waits_for_room(load.infos[number], queued):
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
        if page is not None and self.disk is not None:
            self.disk.errors[f"read_{Reason.LATE.value}"] += 1
            self.reading.failed()
        load.end = number
        return PageState.ABSENT

    def take(self, load: Load, number: int) -> tuple[Any, Tier]:
        """The payload of a page that is ready, and the tier that it came from. The caller copies it to L1
        before anything else is dispatched.
        """
        page = load.held.pop(number, None)
        tier = Tier.L2 if page is None else Tier.L3
        if page is None:
            page = self.host.find(load.infos[number])
        assert page is not None
        payload = page.payload
        if tier is Tier.L3:
            self.host.release(page)
        else:
            self.counts.by_tier[Tier.L2].loads += 1
        return payload, tier

    def count_hit(self, tier: Tier, tokens: int) -> None:
        """A request took a page from this tier, for this many of its tokens; the tiers above lacked it."""
        counts = self.counts.by_tier[tier]
        counts.hits += 1
        counts.hit_tokens += tokens
        self._count_misses(1, _ABOVE[tier])

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

    def next_late(self, loads: Iterable[Load]) -> float | None:
        """When, by the clock, the first of these loads will be late."""
        return min((load.late_at for load in loads if load.late_at is not None), default=None)

    def longest(self, infos: Sequence[PageInfo]) -> dict[Tier, int]:
        """Pages of the longest cached prefix by the nearest tier that has them; changes nothing."""
        found = dict.fromkeys(Tier, 0)
        for info in infos:
            tier = self._nearest(info)
            if tier is None:
                break
            found[tier] += 1
        return found

    # Saving

    def has(self, info: PageInfo) -> bool:
        """Whether a page below L1 need not be copied there again."""
        return self.host.find(info) is not None or (self.disk is not None and self.disk.has(info))

    def choose(self, offers: Iterable[Offer]) -> list[Offer]:
        """Those of the offered pages that are to be copied to L2 now."""
        chosen: dict[bytes, Offer] = {}
        for offer in map(self._noted, offers):
            if not self._below(offer) and self._goes_down(offer):
                chosen[offer.info.key] = offer
        return list(chosen.values())

    def take_leaving(self) -> list[Offer]:
        """Pages that L1 has just evicted and that no lower tier holds: to be copied before the next step."""
        leaving, self.leaving = self.leaving, []
        return [o for o in leaving if not self._below(o) and (self.host.keep or self._admits(o))]

    def saved(self, offer: Offer, payload: Any) -> HostPage | None:
        """Takes a page's copy into L2, and on to L3 as the policy says; None where L2 has no room."""
        through = self._admits(offer) and not (self._write_back and self.host.keep)
        page = self._place(offer.info, payload, through) if through or self._follows(offer.info) else None
        if page is None:
            self.counts.by_tier[Tier.L2 if self.host.keep else Tier.L3].drops += 1
            return None
        page.prompt_tokens = offer.prompt_tokens
        self.counts.by_tier[Tier.L2].stores += 1
        if self.disk is None:
            return page
        if through:
            self._queue(page)
        elif self._write_back:
            self.host.dirty[offer.info.key] = page
            self._clean()
        if not self.host.keep and not page.holds and not page.failed:
            self.host.drop(page)
        return page

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

    def drop_host(self, *, stored_only: bool = False) -> int:
        """Drops every page of L2 that nobody needs just now, or only those that L3 has; returns how many."""
        pages = [p for p in self.host.pages() if not p.holds]
        if stored_only:
            pages = [p for p in pages if self.disk is not None and self.disk.find(p.info) is not None]
        for page in pages:
            self.host.drop(page)
        return len(pages)

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

    def _trees(self) -> list[PageTree[Any]]:
        return [self.host.tree, *([self.disk.tree] if self.disk is not None else [])]

    def close(self) -> None:
        """Ends L3; what is still to be written is lost."""
        if self.disk is not None:
            self.disk.close()

    def drop_unusable(self, usable: Callable[[Any], bool]) -> None:
        """Drops the pages of L2 whose copy failed with the step that it waited for."""
        for page in self.host.pages():
            if page.payload is not None and not usable(page.payload):
                page.failed = True
                if not page.holds:
                    self.host.drop(page)

    def check(self) -> None:
        """Raises AssertionError where the bookkeeping contradicts itself."""
        self.host.tree.check()
        assert len(self.host.tree) <= self.host.tree.capacity
        assert 0 <= self._writing <= _WRITES
        if self.disk is not None:
            self.disk.tree.check()

    # Inside

    def _longest(self, infos: Sequence[PageInfo]) -> tuple[int, dict[Tier, int]]:
        """How many pages are cached in a row, and the first page that comes from L2 and from L3."""
        first: dict[Tier, int] = {}
        for number, info in enumerate(infos):
            tier = self._nearest(info)
            if tier is None:
                return number, first
            if tier is not Tier.L1:
                first.setdefault(tier, number)
        return len(infos), first

    def _nearest(self, info: PageInfo) -> Tier | None:
        if self.pool.find(info) is not None:
            return Tier.L1
        page = self.host.find(info)
        if page is not None:
            return Tier.L2 if page.payload is not None else Tier.L3
        return Tier.L3 if self.disk is not None and self.disk.find(info) is not None else None

    def _touch(self, infos: Sequence[PageInfo]) -> None:
        keys = [info.key for info in infos]
        self.host.touch(keys)
        if self.disk is not None:
            self.disk.touch(keys)

    def _count_misses(self, pages: int, tiers: Iterable[Tier]) -> None:
        there = {Tier.L1: True, Tier.L2: self.host.keep, Tier.L3: self.disk is not None}
        for tier in tiers:
            self.counts.by_tier[tier].misses += pages if there[tier] else 0

    def _gated(self, infos: Sequence[PageInfo], end: int, first: dict[Tier, int]) -> int:
        """Where to stop loading, for computing the rest is faster."""
        for tier in (Tier.L3, Tier.L2):
            start = first.get(tier, end)
            pages = sum(self._nearest(info) is tier for info in infos[start:end])
            if pages and not self.gate.worth_loading(tier, pages):
                end = start
        return end

    def _patience(self, pages: int) -> float:
        if self.policy.load != "auto":
            return self.policy.load_timeout_s
        speed = self.gate.prefill_tokens_per_s
        if not speed:
            return self.policy.load_timeout_s
        computing = pages * self.pool.page_size / speed
        return min(self.policy.load_timeout_s, _PATIENCE * computing + _PATIENCE_S)

    def _pump(self, load: Load, *, queued: bool) -> None:
        """Starts reads in order, as far as L2 has room for them."""
        while load.next < load.end:
            info = load.infos[load.next]
            page = self.host.find(info)
            if self.pool.find(info) is None and (page is None or page.payload is None):
                if page is None:
                    page = self._read(info, queued)
                if page is None:
                    return
                if load.next not in load.held:
                    self.host.hold(page)
                    load.held[load.next] = page
            load.next += 1

    def _read(self, info: PageInfo, queued: bool) -> HostPage | None:
        if self.disk is None or self.disk.find(info) is None or self._loads_hold_enough(queued):
            return None
        page = self._place(info, None, through=True) if self.reading.allows() else None
        if page is not None:
            self.host.hold(page)  # for the read itself
            self._start_read(page)
        return page

    def _start_read(self, page: HostPage) -> None:
        assert self.disk is not None
        stored = self.disk.find(page.info)
        assert stored is not None
        self._reads.started(self._clock())
        page.cancel = self.disk.store.read(stored, page.info, lambda outcome: self._deliver(page, outcome))

    def _loads_hold_enough(self, queued: bool) -> bool:
        """The rest of L2 is for saving."""
        share = self.host.tree.capacity * (2 if queued else 3) // 4
        return self.host.held - self._promised > share

    def _waits_for_room(self, info: PageInfo, queued: bool) -> bool:
        """Whether a page would be read if other loads did not hold so many."""
        there = self.disk is not None and self.disk.find(info) is not None
        return there and self.reading.state is BreakerState.CLOSED and self._loads_hold_enough(queued)

    def _deliver(self, page: HostPage, outcome: ReadOutcome) -> None:
        """On a thread of the store: makes the bytes a page and hands it over."""
        assert self.disk is not None
        try:
            payload = None if outcome.data is None else self.disk.pages.host_page(outcome.data)
        except Exception:
            _log.exception("a page read from L3 could not be put into host memory")
            payload = None
        self._post(lambda: self._arrived(page, payload, outcome))

    def _arrived(self, page: HostPage, payload: Any | None, outcome: ReadOutcome) -> None:
        assert self.disk is not None
        burst = self._reads.ended(outcome.data, self._clock())
        if outcome.reason is Reason.CANCELLED and page.holds > 1 and self.disk.find(page.info) is not None:
            self._start_read(page)  # somebody has come for it since
            return
        page.cancel = None
        self.host.arrived(page, payload)
        if outcome.reason is not None:
            self.disk.unreadable(outcome.page, outcome.reason)
        else:
            self.counts.by_tier[Tier.L3].loads += 1
        if burst is not None and burst.pages:
            self.gate.record_load(Tier.L3, burst.pages, burst.seconds)
            self.read_speed.record(burst.bytes, burst.seconds)
        _tell(self.reading, outcome.reason)
        self.host.release(page)

    def _follows(self, info: PageInfo) -> bool:
        """Whether the page can be found again below L1: the one before it is there. Under write-back L1 gives
        up leaves first, and the one before it is to follow.
        """
        if self._write_back or info.parent == info.root or info.parent in self.host.tree:
            return True
        return self.disk is not None and info.parent in self.disk.tree

    def _place(self, info: PageInfo, payload: Any | None, through: bool) -> HostPage | None:
        """Adds a page to L2. One on its way through, from or to L3, may take the room of a page above it
        where L2 is full of these, if L3 has that page as well: so prompts longer than L2 pass.
        """
        page = self.host.add(info, payload)
        if page is not None or not through or self.disk is None or info.key in self.host.tree:
            return page
        above = self.host.tree.get(info.parent)
        while above is not None and (above.holds or self.disk.find(above.info) is None):
            above = self.host.tree.get(above.info.parent)
        if above is None:
            return None
        self.host.drop(above)
        self.host.tree.evictions += 1
        return self.host.add(info, payload)

    def _noted(self, offer: Offer) -> Offer:
        """Remembers that a page was seen, where its second use decides: one seen before counts as used."""
        if self.disk is None or self.policy.l3_admission != "second-use":
            return offer
        if offer.info.key in self._seen:
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
        if page.payload is not None and not self._write_back and offer.used and self._admits(offer):
            self._queue(page)
        return True

    def _goes_down(self, offer: Offer) -> bool:
        if self._write_back or (self.policy.write == "write-through-selective" and not offer.used):
            return False
        return self.host.keep or self._admits(offer)

    def _admits(self, offer: Offer) -> bool:
        """Whether L3 takes the page, by the policy."""
        if self.disk is None or offer.prompt_tokens < self.policy.l3_min_tokens:
            return False
        return self.policy.l3_admission == "always" or offer.used

    def _queue(self, page: HostPage) -> None:
        assert self.disk is not None
        if page in self._unwritten or self.disk.has(page.info):
            return
        self._queued += 1
        self._unwritten[page] = self._queued
        # More would leave L2 no room for what comes: those may go before their turn to be written.
        page.promised = not self.host.keep or self._promised < self.host.tree.capacity // 2
        if page.promised:
            self._promised += 1
            self.host.hold(page)
        self._backlog.append(page)
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
                page.promised = True
                self._promised += 1
                self.host.hold(page)
            self._writing += 1
            self.disk.store.write(
                page.info,
                partial(self.disk.pages.host_bytes, page.payload),
                partial(self._after_write, page),
            )

    def _after_write(self, page: HostPage, outcome: WriteOutcome) -> None:
        """On a thread of the store."""
        self._post(lambda: self._written(page, outcome))

    def _written(self, page: HostPage, outcome: WriteOutcome) -> None:
        assert self.disk is not None
        self._writing -= 1
        if self.disk.written(page.info, outcome):
            self.counts.by_tier[Tier.L3].stores += 1
            self.write_speed.record(outcome.bytes, outcome.seconds)
        else:
            self._drop(page)
        _tell(self.writing, outcome.reason)
        self._unqueue(page)
        self._write_some()
        self._settle()

    def _unqueue(self, page: HostPage) -> None:
        del self._unwritten[page]
        if page.promised:
            page.promised = False
            self._promised -= 1
            self.host.release(page)

    def _drop(self, page: HostPage) -> None:
        self.counts.by_tier[Tier.L3].drops += 1
        _log.debug("page %s is not written to L3", page.info.key.hex())

    def _clean(self) -> None:
        """Writes ahead what would otherwise be lost when L2 evicts it."""
        while self.host.dirty and len(self.host.tree) * 4 >= self.host.tree.capacity * 3:
            if self.pending_writes >= self.host.tree.capacity // 4:
                return
            self._queue(self.host.dirty.popitem(last=False)[1])

    def _settle(self) -> None:
        first = next(iter(self._unwritten.values()), self._queued + 1)
        while self._drained and self._drained[0][0] < first:
            self._drained.pop(0)[1]()


def _tell(breaker: Breaker, reason: Reason | None) -> None:
    if is_fault(reason):
        breaker.failed()
    elif reason is None:
        breaker.succeeded()
