"""Pages of a store packed into few records, for etcd: which records must be written when. Pure.

Keys are packed into extents of 64 in the order in which pages were written. An extent is written when it is
full; when 8 of its pages are gone it is written again without them; when 16 are left they move on to the
extent that is being filled, and the record is deleted once these are recorded there. So a page costs 1/64 of
a write to add, and about 1/7 when it is added and evicted in any order. What is not recorded yet, and what is
recorded and gone, is bounded by these numbers, not by time: readers treat records as hints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

EXTENT_PAGES = 64
_REWRITE_AT = 8
_MERGE_AT = 16
# What may be spent, in writes a page, on records that are not due, when there is nothing else to do.
_SPENT_PER_ADDED = 1 / 40
_SPENT_PER_REMOVED = 1 / 8


@dataclass(frozen=True, slots=True)
class ExtentPut:
    number: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ExtentDelete:
    number: int


ExtentOp = ExtentPut | ExtentDelete


@dataclass(slots=True)
class _Extent:
    keys: list[bytes]  # in order; some may have been removed or moved
    live: int = 0
    issued: bool = False  # whether etcd may have a record
    added: int = 0  # keys that the record lacks
    removed: int = 0  # keys of the record that are gone


@dataclass(frozen=True, kw_only=True)
class ExtentStats:
    pages: int
    pages_added: int  # since the start
    pages_removed: int
    puts: int
    deletes: int
    unsaved: int  # pages that no record has


class ExtentMap:
    """What a store holds and what the records say. Starts by `load`ing the records in the order of their
    numbers, while changes are collected; `finish_load` ends that. Then `plan` says what to write, and
    `commit` that it was. Not thread-safe.
    """

    def __init__(self) -> None:
        self._extents: dict[int, _Extent] = {}
        self._where: dict[bytes, int] = {}
        self._waiting: dict[bytes, None] = {}  # held, and not yet found in a record or placed
        self._loading = True
        self._open = 0  # the extent that takes new keys
        self._due: set[int] = set()
        self._minor: set[int] = set()  # differ from their records, by little
        self._retired: dict[int, tuple[int, ...]] = {}  # to be deleted once these extents are recorded
        self._added = self._removed = self._puts = self._deletes = 0

    def __len__(self) -> int:
        return len(self._where) + len(self._waiting)

    @property
    def stats(self) -> ExtentStats:
        unsaved = sum(self._extents[number].added for number in self._due | self._minor)
        return ExtentStats(
            pages=len(self),
            pages_added=self._added,
            pages_removed=self._removed,
            puts=self._puts,
            deletes=self._deletes,
            unsaved=unsaved + len(self._waiting),
        )

    @property
    def changes(self) -> int:
        """Grows with every page that is added or removed."""
        return self._added + self._removed

    def add(self, keys: Iterable[bytes]) -> None:
        """Keys that are there already are passed over."""
        for key in keys:
            if key in self._where or key in self._waiting:
                continue
            self._added += 1
            if self._loading:
                self._waiting[key] = None
            else:
                self._place(key)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Unknown keys are passed over."""
        for key in keys:
            if key in self._waiting:
                del self._waiting[key]
                self._removed += 1
                continue
            number = self._where.pop(key, None)
            if number is None:
                continue
            self._removed += 1
            extent = self._extents[number]
            extent.live -= 1
            extent.removed += extent.issued
            self._mark(number, extent)

    def begin_load(self) -> None:
        """Before the first `load`, also where an earlier loading was broken off."""
        self._waiting = dict.fromkeys([*self._where, *self._waiting])
        self._loading, self._open = True, 0
        for found in (self._extents, self._where, self._due, self._minor, self._retired):
            found.clear()

    def load(self, recorded: Iterable[tuple[int, Sequence[bytes]]]) -> None:
        """Takes records as they are in etcd; what they name and is not held is as good as removed."""
        for number, keys in recorded:
            extent = _Extent(keys=[], issued=True, removed=len(keys))
            for key in keys:
                if key in self._waiting:
                    del self._waiting[key]
                    self._where[key] = number
                    extent.keys.append(key)
            extent.live = len(extent.keys)
            extent.removed -= extent.live
            last, self._open = self._open, number
            self._extents[number] = extent
            self._mark(number, extent)
            self._load_closed(last)

    def finish_load(self, at_most: int) -> bool:
        """Places so many of the keys that no record had; False if some are left."""
        for key in [key for key, _ in zip(self._waiting, range(at_most), strict=False)]:
            del self._waiting[key]
            self._place(key)
        self._loading = bool(self._waiting)
        return not self._loading

    def forget_records(self) -> None:
        """etcd was emptied: everything must be written again."""
        self._retired.clear()
        for number, extent in self._extents.items():
            extent.issued, extent.added, extent.removed = False, extent.live, 0
            self._mark(number, extent)

    def plan(self, limit: int, *, everything: bool = False, idle: bool = False) -> list[ExtentOp]:
        """At most so many writes that are due, to be done all at once; empty if nothing is.

        `everything` is for a clean stop. `idle` adds what is not due, as far as few writes were made so far.
        """
        ops: list[ExtentOp] = []
        for number in self._candidates(limit, everything, idle):
            if len(ops) == limit:
                break
            op = self._plan_one(number)
            if op is not None:
                ops.append(op)
        for number, needs in self._retired.items():
            if len(ops) == limit:
                break
            if all(self._recorded(need) for need in needs):
                ops.append(ExtentDelete(number))
        return ops

    def commit(self, ops: Iterable[ExtentOp]) -> None:
        """They were done. What has changed since they were planned stays to be written."""
        for op in ops:
            if isinstance(op, ExtentPut):
                self._puts += 1
                extent = self._extents[op.number]
                extent.removed = sum(self._where.get(key) != op.number for key in op.keys)
                extent.added = extent.live - (len(op.keys) - extent.removed)
            else:
                self._deletes += 1
                if self._retired.pop(op.number, None) is not None:
                    continue
                extent = self._extents[op.number]
                extent.issued, extent.removed, extent.added = False, 0, extent.live
            self._mark(op.number, extent)

    def check(self) -> None:
        """Raises AssertionError if the map contradicts itself."""
        live: dict[int, int] = {}
        for number in self._where.values():
            live[number] = live.get(number, 0) + 1
        for number, extent in self._extents.items():
            assert extent.live == live.pop(number, 0), number
            assert len(extent.keys) <= EXTENT_PAGES
            assert {key for key in extent.keys if self._where.get(key) == number} == {
                key for key, there in self._where.items() if there == number
            }
            dirty = extent.added or extent.removed
            assert not dirty or number in self._due or number in self._minor, number
        assert not live
        assert not self._due & self._minor
        assert not self._retired.keys() & self._extents.keys()

    def _candidates(self, limit: int, everything: bool, idle: bool) -> Iterator[int]:
        yield from tuple(self._due)
        if everything:
            yield from tuple(self._minor)
        elif idle:
            earned = self._added * _SPENT_PER_ADDED + self._removed * _SPENT_PER_REMOVED
            left = min(limit, int(earned) - self._puts - self._deletes)
            yield from [number for number, _ in zip(self._minor, range(left), strict=False)]

    def _plan_one(self, number: int) -> ExtentOp | None:
        extent = self._extents.get(number)
        if extent is None:
            return None
        if extent.live == 0:
            if extent.issued:
                return ExtentDelete(number)
            self._drop(number)
            return None
        if number != self._open and extent.live <= _MERGE_AT and not extent.added:
            self._merge(number, extent)
            return None
        extent.keys = self._live_keys(number, extent)
        extent.issued = True
        return ExtentPut(number, tuple(extent.keys))

    def _merge(self, number: int, extent: _Extent) -> None:
        keys = self._live_keys(number, extent)
        for key in keys:
            self._place(key)
        self._drop(number)
        self._retired[number] = tuple({self._where[key] for key in keys})

    def _load_closed(self, number: int) -> None:
        """This one was the last until now and takes no more keys; is it worth its record?"""
        extent = self._extents.get(number)
        if extent is not None and number != self._open:
            self._mark(number, extent)
            if extent.live <= _MERGE_AT:
                self._minor.discard(number)
                self._due.add(number)

    def _place(self, key: bytes) -> None:
        extent = self._extents.get(self._open)
        if extent is not None and len(extent.keys) == EXTENT_PAGES:
            extent.keys = self._live_keys(self._open, extent)
        if extent is None:
            extent = self._extents[self._open] = _Extent(keys=[])
        elif len(extent.keys) == EXTENT_PAGES:
            self._open += 1
            self._mark(self._open - 1, extent)
            extent = self._extents[self._open] = _Extent(keys=[])
        extent.keys.append(key)
        extent.live += 1
        extent.added += 1
        self._where[key] = self._open
        self._mark(self._open, extent)

    def _mark(self, number: int, extent: _Extent) -> None:
        full = number != self._open or extent.live == EXTENT_PAGES
        dead = number != self._open and extent.live == 0
        self._due.discard(number)
        self._minor.discard(number)
        if (full and extent.added) or extent.removed >= _REWRITE_AT or dead:
            self._due.add(number)
        elif extent.added or extent.removed:
            self._minor.add(number)

    def _drop(self, number: int) -> None:
        del self._extents[number]
        self._due.discard(number)
        self._minor.discard(number)

    def _recorded(self, number: int) -> bool:
        extent = self._extents.get(number)
        return extent is None or extent.added == 0

    def _live_keys(self, number: int, extent: _Extent) -> list[bytes]:
        return [key for key in dict.fromkeys(extent.keys) if self._where.get(key) == number]
