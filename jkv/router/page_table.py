"""A hash table from page keys to 32-bit values, whole batches at a time. Pure numpy, no Python object per
page.

A key is the first 8 bytes of a page's key. They are a hash already (blake2b), so the low and the high half
name two buckets of 8 slots each, and the key is in one of them: a lookup reads two cache lines, a removal
leaves no tombstone. An insertion takes the emptier bucket; where both are full it moves keys on to their
other buckets. Source: Pagh and Rodler, "Cuckoo hashing"; the growth is Litwin's linear hashing: buckets are
split one by one, in place, in memory that is reserved at the start and touched when it is needed. So nothing
is ever copied as a whole, and there is no pause.
"""

from __future__ import annotations

import numpy as np

from jkv.errors import JkvError
from jkv.router.memory import memory_bytes, reserved

SLOTS = 8  # in a bucket: 64 bytes of keys, a cache line
_SLOT_BYTES = 12
_LOAD = 0.65  # of the slots, when buckets are split: at 0.75 insertions take 1.4 times as long
_FIRST_BUCKETS = 256
_ROUNDS = 200  # of an insertion, before more buckets are split for it

Array = np.ndarray


class PageTable:
    """Owner: one thread. Keys are uint64, values uint32, none of them 0. A batch has no key twice."""

    def __init__(self, reserve: int | None = None) -> None:
        """It can grow to `reserve` buckets; by default to those that fit in half of the memory."""
        self.used = 0
        buckets = reserve or memory_bytes() // 2 // (SLOTS * _SLOT_BYTES)
        self._keys = reserved(buckets, SLOTS, np.uint64)
        self._values = reserved(len(self._keys), SLOTS, np.uint32)
        self._level, self._split = _FIRST_BUCKETS, 0  # buckets below `_split` have been split into two
        self._random = np.random.default_rng(0)

    @property
    def slots(self) -> int:
        """Places for keys, free ones included; all that slot numbers can be."""
        return (self._level + self._split) * SLOTS

    @property
    def nbytes(self) -> int:
        """Of the memory in use; what is only reserved takes none."""
        return self.slots * _SLOT_BYTES

    @property
    def values(self) -> Array:
        """By slot, to read and to overwrite; 0 is a free slot."""
        return self._values.reshape(-1)[: self.slots]

    @property
    def keys(self) -> Array:
        """By slot; 0 is a free slot."""
        return self._keys.reshape(-1)[: self.slots]

    def find(self, keys: Array) -> Array:
        """The slot of each key, int64, or -1. Slots hold until the next `insert` or `reserve`."""
        buckets = self._buckets(keys)
        hits = (self._keys[buckets] == keys[:, None, None]).reshape(len(keys), 2 * SLOTS)
        at = hits.argmax(1)
        rows = np.arange(len(keys))
        return np.where(hits[rows, at], buckets[rows, at // SLOTS] * SLOTS + at % SLOTS, -1)

    def remove(self, slots: Array) -> None:
        """Frees these slots; all of them are in use."""
        self.keys[slots] = 0
        self.values[slots] = 0
        self.used -= len(slots)

    def reserve(self, extra: int) -> bool:
        """Makes room for so many more keys; whether any slot has changed for that.

        Raises:
            JkvError: no memory is left for them.
        """
        needed = int((self.used + extra) / _LOAD) + 1 - self.slots
        enough = needed <= 0
        while needed > 0:
            needed -= SLOTS * self._split_next(-(-needed // SLOTS))
        return not enough

    def insert(self, keys: Array, values: Array) -> None:
        """Adds keys that are not there.

        Raises:
            JkvError: see `reserve`; none of them is added.
        """
        self.reserve(len(keys))
        self.used += len(keys)
        rounds = 0
        while len(keys):
            keys, values = self._place(keys, values)
            rounds += 1
            if rounds % _ROUNDS == 0:
                self._split_next(self._level // 8)

    def check(self) -> None:
        """Raises AssertionError where a key cannot be found, or is there twice, or the count is wrong."""
        slots = np.flatnonzero(self.keys)
        assert len(slots) == self.used == np.count_nonzero(self.values)
        assert (self.values[slots] != 0).all()
        assert (self.find(self.keys[slots]) == slots).all()

    def _buckets(self, keys: Array) -> Array:
        """The two buckets of each key, int64 [n, 2]."""
        halves = np.empty((len(keys), 2), np.int64)
        halves[:, 0] = keys & np.uint64(0xFFFFFFFF)
        halves[:, 1] = keys >> np.uint64(32)
        return self._address(halves)

    def _address(self, halves: Array) -> Array:
        before = halves & (self._level - 1)
        return np.where(before < self._split, halves & (2 * self._level - 1), before)

    def _place(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Puts down what finds a free slot; returns what does not, and the keys that had to make room."""
        rows = np.arange(len(keys))
        buckets = self._buckets(keys)
        free = self._keys[buckets] == 0  # [n, 2, slots]
        room = free.sum(2)
        side = np.where(
            room[:, 0] == room[:, 1], self._random.integers(2, size=len(keys)), room.argmax(1)
        )  # the emptier one
        bucket = buckets[rows, side]
        order = np.argsort(bucket, kind="stable")
        bucket, keys, values = bucket[order], keys[order], values[order]
        free, room = free[rows, side][order], room[rows, side][order]
        # How many keys before it want the same bucket: the first takes its first free slot, and so on.
        starts = np.concatenate(([True], bucket[1:] != bucket[:-1]))
        rank = rows - np.maximum.accumulate(np.where(starts, rows, 0))
        fits = rank < room
        slot = (free[fits].cumsum(1) == rank[fits, None] + 1).argmax(1)
        self._keys[bucket[fits], slot] = keys[fits]
        self._values[bucket[fits], slot] = values[fits]
        self._exchange(bucket, keys, values, (room == 0) & (rank == 0))
        return keys[~fits], values[~fits]

    def _exchange(self, bucket: Array, keys: Array, values: Array, full: Array) -> None:
        """Gives these keys a slot of a full bucket, and takes in their place what was there."""
        into = bucket[full], self._random.integers(SLOTS, size=int(full.sum()))
        moved_keys, moved_values = self._keys[into], self._values[into]
        self._keys[into], self._values[into] = keys[full], values[full]
        keys[full], values[full] = moved_keys, moved_values

    def _split_next(self, count: int) -> int:
        """Splits up to `count` buckets; returns how many. Keys stay in a bucket or go to its new one."""
        start, end = self._split, min(self._split + count, self._level)
        if self._level + end > len(self._values):
            raise JkvError(
                f"the index is full: {self.used} pages in {self.nbytes / 2**30:.1f} GiB; "
                "give the router more memory"
            )
        old, new = slice(start, end), slice(self._level + start, self._level + end)
        keys, values = self._keys[old], self._values[old]
        low, high = keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32)
        here = (low & np.uint64(self._level - 1)) == np.arange(start, end, dtype=np.uint64)[:, None]
        goes = (np.where(here, low, high) & np.uint64(self._level)) != 0
        self._keys[new], self._values[new] = np.where(goes, keys, 0), np.where(goes, values, 0)
        keys[goes], values[goes] = 0, 0
        self._split = end
        if end == self._level:
            self._level, self._split = 2 * self._level, 0
        return end - start
