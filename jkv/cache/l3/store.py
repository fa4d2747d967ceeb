"""The page store: reads, writes and deletes pages on threads of its own, and verifies all that it reads.

No call but `open`, `list`, `save_recency` and `close` waits for the store. Outcomes come through callbacks,
once for each call, on the store's threads; on the caller's after `close`, for what it cancels, and while the
store hangs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from jkv.cache.l3 import faults as injected
from jkv.cache.l3 import format, listing, names, owner
from jkv.cache.l3.budget import WriteBudget
from jkv.cache.l3.faults import Faults, FaultyObjects
from jkv.cache.l3.format import StoreIdentity
from jkv.cache.l3.housekeeping import QUARANTINE_MAX, DiskCost, describe_model, other_models, sweep
from jkv.cache.l3.listing import Listing
from jkv.cache.l3.names import StoredPage
from jkv.cache.l3.objects import KvObjects, ObjectError, Objects, open_objects
from jkv.cache.l3.readers import Cancellable, Readers
from jkv.cache.l3.reasons import Reason
from jkv.cache.l3.token import store_token
from jkv.cache.l3.watch import Watch
from jkv.cache.l3.writers import Turn, Writers
from jkv.cache.pages import PageInfo
from jkv.cache.replica import StorePlace
from jkv.errors import ConfigError

_log = logging.getLogger(__name__)

# A page of some MiB takes milliseconds. TensorStore itself tries an object store six times in up to 9 s, and
# a disk under load may take seconds to sync: what takes longer than this hangs, or is of no use.
_CHANGE_TIMEOUT_S = 15.0


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Where pages are kept, and how."""

    location: str  # a path, or a file://, gs://, s3:// or memory:// URL
    owner: str | None = None
    sync: bool = False  # fsync each object and its directory
    write_bytes_per_s: float | None = None
    daily_write_bytes: int | None = None
    read_threads: int = 4
    write_threads: int = 2
    change_timeout_s: float = _CHANGE_TIMEOUT_S  # of a write or a deletion, once its turn has come


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    page: StoredPage
    data: np.ndarray | None  # flat uint8, `page_bytes` long, read-only; None where there is a reason
    reason: Reason | None
    seconds: float  # reading and verifying, without the time in the queue


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    page: StoredPage
    reason: Reason | None
    seconds: float  # encoding and writing, without waiting: in the queue, for the budget, for the data
    bytes: int  # written


class PageStore:
    """One engine's view of a store: its own pages, and those of others to read. Calls come from any thread.

    Operations on one key that change the store happen in the order of their calls; reads are a queue of their
    own.
    """

    def __init__(
        self,
        objects: KvObjects,
        options: StoreOptions,
        identity: StoreIdentity,
        faults: Faults | None = None,
    ) -> None:
        """Claims an owner and tidies up after its last holder; see `open`."""
        self._objects, self._identity = objects, identity
        listed = objects.list()
        self.owner, self._hold = owner.claim(objects, options.owner, identity.model8, listed)
        try:
            self.place = StorePlace(url=options.location, token=store_token(objects), owner=self.owner)
            self._tidy(listed)
            budget = objects.read(names.budget(self.owner)).result()
            self._recency = listing.decode_recency(objects.read(names.recency(self.owner)).result())
        except BaseException:
            self._hold.release()
            raise
        self._lock = threading.Lock()  # guards _budget, _hold and _quarantined
        self._budget = WriteBudget(
            bytes_per_s=options.write_bytes_per_s,
            daily_bytes=options.daily_write_bytes,
            clock=time.monotonic,
            wall=time.time,
            saved=budget,
        )
        self._daily = options.daily_write_bytes is not None
        self._quarantined = 0
        self._bad_foreign: set[StoredPage] = set()
        self._pages: Objects = objects if faults is None else FaultyObjects(objects, faults)
        self._closing = threading.Event()
        self._watch: Watch | None = None
        self._submitting = threading.Lock()  # so that no job comes after the threads' last
        self._readers = Readers("l3-read", options.read_threads)
        self._writers = Writers("l3-write", options.write_threads, options.change_timeout_s)

    @classmethod
    def open(
        cls, options: StoreOptions, identity: StoreIdentity, *, faults: Faults | None = None
    ) -> PageStore:
        """Opens the store, makes it where it is missing, claims an owner and sweeps its leftovers.

        Raises:
            ConfigError: names --l3-dir where it cannot be used, --l3-owner where another engine holds it.
        """
        objects = open_objects(options.location, sync=options.sync)
        try:
            return cls(objects, options, identity, faults or injected.from_environment())
        except (OSError, ObjectError) as error:
            raise ConfigError(f"--l3-dir {options.location}: cannot be used: {error}") from error

    def page(self, info: PageInfo) -> StoredPage:
        """The page that a write of `info` makes."""
        return names.page_of(self.owner, self._identity.model8, info)

    def list(self) -> Listing:
        """All pages, from their names alone; those found bad in other owners' are left out.

        Raises:
            ObjectError: the store cannot be listed.
        """
        found = listing.build(
            self._objects, self.owner, self._identity.model8, self._stale_costs, self._recency
        )
        good = [page for page in found.foreign if page not in self._bad_foreign]
        return Listing(own=found.own, foreign=good, stale=found.stale)

    def watch(self, found: Callable[[list[StoredPage]], None]) -> None:
        """Has `found` called with all pages of other owners whenever these have changed, until `close`."""
        self._watch = Watch(self._foreign, found)

    def read(
        self, page: StoredPage, info: PageInfo, done: Callable[[ReadOutcome], None]
    ) -> Callable[[], None]:
        """Reads and verifies a page; returns a function that cancels it, at any time and from any thread.

        Cancelling calls `done` at once, unless it has been called.
        """
        assert page.key == info.key, "a page is read for another key"
        state = Cancellable(lambda: done(ReadOutcome(page, None, Reason.CANCELLED, 0.0)))

        def job() -> None:
            started = time.perf_counter()
            data, reason = self._read(page, info, state)
            if state.finish():
                done(ReadOutcome(page, data, reason, time.perf_counter() - started))

        with self._submitting:
            closed = self._closing.is_set()
            if not closed:
                self._readers.submit(job)
        if closed and state.finish():
            done(ReadOutcome(page, None, Reason.CLOSED, 0.0))
        return state.cancel

    def write(
        self, info: PageInfo, data: Callable[[], np.ndarray], done: Callable[[WriteOutcome], None]
    ) -> None:
        """Publishes a page under this owner. `data`, called when its turn comes, gives it as flat uint8.

        What is published after it was refused for its time is deleted again: nobody knows of it.
        """
        page = self.page(info)

        def job(turn: Turn) -> None:
            outcome = self._write(page, info, data, turn)
            if turn.finish():
                done(outcome)
            elif outcome.reason is None:
                self._delete(page)

        self._change(page, job, lambda reason: done(WriteOutcome(page, reason, 0.0, 0)))

    def delete(self, page: StoredPage, done: Callable[[bool], None] | None = None) -> None:
        """Deletes an own page; `done` hears whether its room is free, which is so if it was gone already."""
        assert page.owner == self.owner, "another owner's page is deleted"
        self._free(page, done, first=None)

    def quarantine(self, page: StoredPage, done: Callable[[bool], None] | None = None) -> None:
        """Takes a page that was read and found bad out of the store.

        The first few own ones are kept aside until the next start, to be looked into; `done` is as for
        `delete`. Another owner's page is not touched, only left out of what `list` returns.
        """
        if page.owner == self.owner:
            self._free(page, done, first=self._set_aside)
        else:
            self._bad_foreign.add(page)

    def save_recency(self, keys: Iterable[bytes]) -> None:
        """Saves the order in which own pages were used, oldest first; for a clean stop. Faults are logged."""
        try:
            self._objects.write(names.recency(self.owner), listing.encode_recency(keys)).result()
        except ObjectError as error:
            _log.warning("the order of L3's pages could not be saved: %s", error)

    def close(self) -> None:
        """Finishes writes and deletes, without the budget's pauses, and drops reads, then frees the owner.

        Where the store hangs, the owner is held until the process ends: something may still be written.
        """
        with self._submitting:
            if self._closing.is_set():
                return
            self._closing.set()
        if self._watch is not None:
            self._watch.close()
        if not self._writers.close():
            return
        if self._daily:
            self._save_budget(self._budget.final_state())
        self._hold.release()
        self._readers.close()  # last: a read that hangs must not keep the owner

    def _tidy(self, listed: Iterable[str]) -> None:
        objects, identity = self._objects, self._identity
        orphans = owner.collect_orphans(objects, listed)
        leftovers = sweep(objects, self.owner)
        if orphans or leftovers:
            _log.info("L3: removed %d abandoned owners and %d unfinished writes", len(orphans), leftovers)
        describe_model(objects, self.owner, identity)
        objects.delete_prefix(names.quarantine(self.owner))
        cost = DiskCost(objects.root)
        others = other_models(objects, self.owner, identity, listed)
        self._stale_costs = {model8: cost.page(size) for model8, size in others.items()}
        self.page_cost = cost.page(identity.object_bytes)
        self.overhead_bytes = cost.overhead(identity.object_bytes, 1 + len(others))

    def _foreign(self) -> list[StoredPage]:
        pages = listing.foreign(self._objects, self.owner, self._identity.model8)
        return [page for page in pages if page not in self._bad_foreign]

    def _change(
        self, page: StoredPage, job: Callable[[Turn], None], refused: Callable[[Reason], None]
    ) -> None:
        with self._submitting:
            closed = self._closing.is_set()
            reason = Reason.CLOSED if closed else self._writers.submit(page.key, job, refused)
        if reason is not None:
            refused(reason)

    def _free(
        self,
        page: StoredPage,
        done: Callable[[bool], None] | None,
        first: Callable[[StoredPage], None] | None,
    ) -> None:
        def job(turn: Turn) -> None:
            if first is not None:
                first(page)
            freed = self._delete(page)
            if turn.finish() and done is not None:
                done(freed)

        self._change(page, job, lambda _: None if done is None else done(False))

    def _read(
        self, page: StoredPage, info: PageInfo, state: Cancellable
    ) -> tuple[np.ndarray | None, Reason | None]:
        if self._closing.is_set():
            return None, Reason.CLOSED
        try:
            data = state.run(lambda: self._pages.read_page(page.name, self._identity.object_bytes))
            if data is None:
                return None, Reason.MISSING
            reason = format.verify(self._identity, info, data)
            return (format.payload(data), None) if reason is None else (None, reason)
        except ObjectError as error:
            return None, Reason.IO if error.reason is Reason.READ_ONLY else error.reason
        except Exception:
            _log.exception("L3 page %s was not read", page.name)
            return None, Reason.IO

    def _write(
        self, page: StoredPage, info: PageInfo, data: Callable[[], np.ndarray], turn: Turn
    ) -> WriteOutcome:
        started, reason = time.perf_counter(), None
        try:
            delay = self._admit_write()
            with turn.waiting():
                self._closing.wait(delay)
                payload = _wait_for(data)
            started = time.perf_counter()
            if turn.ended:
                raise ObjectError(Reason.TIMEOUT, "the store did not answer in time before")
            self._publish(page, format.encode(self._identity, info, payload))
        except ObjectError as error:
            _log.debug("L3 page %s was not written: %s", page.name, error)
            reason = error.reason
        except Exception:
            _log.exception("L3 page %s was not written", page.name)
            reason = Reason.IO
        size = 0 if reason else self._identity.object_bytes
        return WriteOutcome(page, reason, time.perf_counter() - started, size)

    def _admit_write(self) -> float:
        """Takes a page out of the budget; returns the seconds to wait, for its pace.

        Raises:
            ObjectError: the page must not be written.
        """
        with self._lock:
            if not self._hold.valid:
                raise ObjectError(Reason.READ_ONLY, "the owner is not held any more")
            delay = self._budget.reserve(self._identity.object_bytes)
            if delay is None:
                raise ObjectError(Reason.BUDGET, "the day's budget is spent")
            if self._budget.unsaved:
                self._save_budget(self._budget.state())
        return delay

    def _publish(self, page: StoredPage, data: bytes) -> None:
        try:
            self._pages.write(page.name, data).result()
        except ObjectError:
            self._delete(page)  # an fsync may have failed after the object was published
            raise

    def _delete(self, page: StoredPage) -> bool:
        try:
            with self._lock:
                if not self._hold.valid:
                    return False
            self._pages.delete(page.name).result()
        except ObjectError as error:
            _log.debug("L3 page %s was not deleted: %s", page.name, error)
            return False
        return True

    def _set_aside(self, page: StoredPage) -> None:
        with self._lock:
            if self._quarantined >= QUARANTINE_MAX:
                return
            self._quarantined += 1
        try:
            data = self._objects.read(page.name).result()
            if data is not None and len(data) <= self._identity.object_bytes:
                self._objects.write(page.quarantined_name, data).result()
                _log.warning("a bad L3 page was set aside as %s", page.quarantined_name)
        except ObjectError as error:
            _log.debug("bad L3 page %s could not be set aside: %s", page.name, error)

    def _save_budget(self, state: bytes) -> None:
        try:
            self._objects.write(names.budget(self.owner), state).result()
        except ObjectError as error:
            _log.warning("the L3 write budget could not be saved: %s", error)


def _wait_for(data: Callable[[], np.ndarray]) -> np.ndarray:
    """The page, once the step that computes it has run."""
    try:
        return data()
    except Exception as error:
        raise ObjectError(Reason.LOST, f"its copy from the device failed: {error}") from error
