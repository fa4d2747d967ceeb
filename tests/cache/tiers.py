"""Lower tiers over a store that answers when a test says so, in the order and as badly as it says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jkv.cache.disk_tier import DiskTier
from jkv.cache.gate import CostGate
from jkv.cache.host_tier import HostTier
from jkv.cache.keys import request_root
from jkv.cache.l1 import L1Pool, Offer
from jkv.cache.l3.listing import Listing
from jkv.cache.l3.names import StoredPage, page_of
from jkv.cache.l3.reasons import Reason
from jkv.cache.l3.store import ReadOutcome, WriteOutcome
from jkv.cache.load import Load, PageState
from jkv.cache.lookup import Policy
from jkv.cache.lower import LowerTiers
from jkv.cache.pages import PageInfo, Source, page_infos
from tests.cache.clock import Clock

PAGE = 4
OWNER, MODEL = "me", "0123abcd"
SECONDS = 0.001  # that each answer of the store claims to have taken


@dataclass(eq=False)
class Operation:
    """A call that the store has not answered yet. `info` is None for a deletion."""

    kind: str  # read | write | delete
    page: StoredPage
    info: PageInfo | None
    answer: Callable[[Reason | None], None]


class FakeStore:
    """Objects by name, each worth 1 byte of capacity. Answers keep the order of changes to one key, as the
    real store's do.
    """

    owner = OWNER
    page_cost = 1
    overhead_bytes = 0

    def __init__(self) -> None:
        self.objects: dict[str, tuple[PageInfo, np.ndarray]] = {}
        self.operations: list[Operation] = []
        self.quarantined: list[StoredPage] = []
        self.recency: list[bytes] = []
        self.writes = self.reads = self.most_objects = 0

    def read(
        self, page: StoredPage, info: PageInfo, done: Callable[[ReadOutcome], None]
    ) -> Callable[[], None]:
        def answer(reason: Reason | None) -> None:
            if reason is Reason.MISSING:
                self.objects.pop(page.name, None)
            known, data = self.objects.get(page.name, (None, None))
            reason = reason or (Reason.MISSING if known is None else None)
            reason = reason or (Reason.MISMATCH if known != info else None)
            done(ReadOutcome(page, None if reason else data, reason, SECONDS))

        def cancel() -> None:
            if operation in self.operations:
                self.finish(operation, Reason.CANCELLED)

        operation = Operation("read", page, info, answer)
        self.operations.append(operation)
        self.reads += 1
        return cancel

    def write(
        self, info: PageInfo, data: Callable[[], np.ndarray], done: Callable[[WriteOutcome], None]
    ) -> None:
        page = page_of(OWNER, MODEL, info)

        def answer(reason: Reason | None) -> None:
            if reason is None:
                self.objects[page.name] = info, data().copy()
                self.most_objects = max(self.most_objects, len(self.objects))
            done(WriteOutcome(page, reason, SECONDS, 0 if reason else 1))

        self.operations.append(Operation("write", page, info, answer))
        self.writes += 1

    def delete(self, page: StoredPage, done: Callable[[bool], None] | None) -> None:
        def answer(reason: Reason | None) -> None:
            if reason is None:
                self.objects.pop(page.name, None)
            if done is not None:
                done(reason is None)

        self.operations.append(Operation("delete", page, None, answer))

    def quarantine(self, page: StoredPage, done: Callable[[bool], None] | None = None) -> None:
        self.quarantined.append(page)
        if page.owner == OWNER:
            self.delete(page, done)

    def save_recency(self, keys: Iterable[bytes]) -> None:
        self.recency = list(keys)

    def close(self) -> None:
        """Answers what is left."""
        for operation in list(self.operations):
            self.finish(operation)

    def ready(self) -> list[Operation]:
        """The operations that may be answered next."""
        changed: set[str] = set()
        ready: list[Operation] = []
        for operation in self.operations:
            if operation.kind == "read":
                ready.append(operation)
            elif operation.page.name not in changed:
                changed.add(operation.page.name)
                ready.append(operation)
        return ready

    def finish(self, operation: Operation, reason: Reason | None = None) -> None:
        self.operations.remove(operation)
        operation.answer(reason)

    def pending(self, kind: str) -> list[Operation]:
        return [o for o in self.operations if o.kind == kind]


class ByteCodec:
    """Pages in host memory that are their own bytes."""

    def page_to_bytes(self, page: np.ndarray, /) -> np.ndarray:
        return page

    def page_from_bytes(self, data: np.ndarray, /) -> np.ndarray:
        return data


@dataclass(kw_only=True)
class Rig:
    """Lower tiers, and the calls that wait for their thread."""

    lower: LowerTiers
    store: FakeStore
    clock: Clock
    calls: list[Callable[[], None]]
    loads: list[Load] = field(default_factory=list)

    @property
    def host(self) -> HostTier:
        return self.lower.host

    @property
    def disk(self) -> DiskTier:
        assert self.lower.disk is not None
        return self.lower.disk

    def deliver(self) -> None:
        """Takes all outcomes that have come."""
        while self.calls:
            self.calls.pop(0)()

    def answer(self, kind: str, reason: Reason | None = None, *, count: int | None = None) -> None:
        """Answers the pending operations of a kind, the oldest first, and delivers what comes of it."""
        for operation in self.store.pending(kind)[:count]:
            self.store.finish(operation, reason)
        self.deliver()

    def settle(self) -> None:
        """Lets the store finish everything, well."""
        self.deliver()
        while self.store.operations:
            self.store.finish(self.store.ready()[0])
            self.deliver()

    def offer(self, infos: Sequence[PageInfo], *, used: bool = False, prompt_tokens: int = 1000) -> int:
        """Offers full pages of L1, copies those that are wanted, and returns how many that were."""
        offers = [Offer(number, info, prompt_tokens, used) for number, info in enumerate(infos)]
        chosen = self.lower.choose(offers)
        for offer in chosen:
            self.lower.saved(offer, content(offer.info))
        return len(chosen)

    def leave(self, offers: Sequence[Offer]) -> None:
        """L1 gives these pages up, under write-back."""
        self.lower.leaving += offers
        for offer in self.lower.take_leaving():
            self.lower.saved(offer, content(offer.info))

    def drain(self) -> None:
        """Writes all that is for L3."""
        drained: list[bool] = []
        self.lower.when_drained(lambda: drained.append(True))
        self.settle()
        assert drained

    def begin(self, infos: Sequence[PageInfo]) -> Load | None:
        load = self.lower.begin(infos)
        if load is not None:
            self.loads.append(load)
        return load

    def bring(self, load: Load, start: int = 0) -> tuple[list[Source], PageState]:
        """Takes pages from number `start` on while they are ready; returns where each came from, and why it
        stopped.
        """
        tiers: list[Source] = []
        while (state := self.lower.state(load, start + len(tiers))) is PageState.READY:
            number = start + len(tiers)
            payload, tier = self.lower.take(load, number)
            assert np.array_equal(payload, content(load.infos[number])), "a page of another key was loaded"
            tiers.append(tier)
        return tiers, state

    def hit(self, infos: Sequence[PageInfo]) -> list[Source]:
        """Loads a prompt with a store that answers at once."""
        load = self.begin(infos)
        if load is None:
            return []
        tiers: list[Source] = []
        state = PageState.COMING
        while state is PageState.COMING:
            self.settle()
            more, state = self.bring(load, len(tiers))
            tiers += more
        self.lower.end(load)
        return tiers

    def check(self) -> None:
        """Raises AssertionError where bookkeeping contradicts itself or the store, or a bound is broken."""
        self.lower.check()
        assert len(self.host.tree) <= self.host.tree.capacity
        assert len(self.disk) <= self.disk.capacity_bytes
        own = sum(name.startswith(OWNER) for name in self.store.objects)
        assert own <= self.disk.capacity_bytes + len(self.disk._deleting) + len(self.disk._undeleted)

    def check_at_rest(self) -> None:
        """After every load has ended and every outcome was delivered: nothing is held, nothing is astray."""
        self.check()
        assert self.host.held == 0
        assert self.lower.pending_writes == 0
        assert all(page.payload is not None and not page.failed for page in self.host.pages())
        if not self.host.keep:
            assert not self.host.pages()
        kept = {page.name for page in self.disk.own_pages()}
        assert len(kept) == len(self.disk)
        undeleted = {page.name for page in self.disk._undeleted.values()}
        stored = {name for name in self.store.objects if name.startswith(OWNER)}
        assert kept <= stored, "a page that is gone would be read"
        assert stored <= kept | undeleted, "the disk is fuller than is known"


def rig(
    *,
    l1: int = 16,
    l2: int = 16,
    l3: int = 64,
    keep: bool = True,
    codec: Any = None,
    own: Sequence[PageInfo] = (),
    foreign: Sequence[PageInfo] = (),
    **policy: Any,
) -> Rig:
    """Tiers of so many pages; `own` and `foreign` pages are in the store already. Loads always, unless told
    otherwise.
    """
    store, clock = FakeStore(), Clock()
    calls: list[Callable[[], None]] = []
    listing = Listing(
        own=[page_of(OWNER, MODEL, info) for info in own],
        foreign=[page_of("other", MODEL, info) for info in foreign],
        stale=[],
    )
    for infos, stored in ((own, listing.own), (foreign, listing.foreign)):
        for info, page in zip(infos, stored, strict=True):
            store.objects[page.name] = info, content(info)
    disk = DiskTier(store, listing, l3, codec or ByteCodec(), calls.append)
    lower = LowerTiers(
        L1Pool(l1, PAGE),
        HostTier(l2, keep=keep),
        disk,
        gate=CostGate(page_size=PAGE, clock=clock),
        policy=Policy(**{"load": "always", **policy}),
        post=calls.append,
        clock=clock,
    )
    return Rig(lower=lower, store=store, clock=clock, calls=calls)


def prompt(family: int, pages: int, salt: str = "") -> list[PageInfo]:
    """The pages of a prompt; those of one family continue each other."""
    root = request_root(bytes(16), cache_salt=salt)
    tokens = [(family * 7919 + i) % 1000 for i in range(pages * PAGE)]
    return page_infos(root, root, tokens, PAGE)


def content(info: PageInfo) -> np.ndarray:
    """What the page with this identity must hold."""
    return np.frombuffer(info.key + info.tokens, np.uint8)
