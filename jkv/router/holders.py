"""Who holds a page, and in which tiers, as one uint32. Pure numpy, whole batches at a time.

Most pages have one holder: its number and a bit for each tier are the value itself. A page that several hold,
as the start of a shared prompt, has a row instead: for every 64 holders three words of 64 bits, one for each
tier. When all but one let go of it the row is given back. So a page costs nothing more, or 24 bytes if it is
shared, for up to 64 engines, and one lookup tells of all of them.
"""

from __future__ import annotations

from array import array

import numpy as np

from jkv.errors import JkvError
from jkv.router.memory import memory_bytes, reserved

TIERS = 3  # bit 0 is the nearest
ALL_TIERS = 7
_WORD = 64
_ROW = np.uint32(1 << 31)  # marks a value that is the number of a row
_ROW_BYTES = 8 * TIERS
_WEIGHTS = np.array([1, 2, 4], np.uint32)

Array = np.ndarray


def single(number: int, tier: int) -> int:
    """The value of a page that one holder has in one tier."""
    return number << TIERS | 1 << tier


class Holders:
    """Owner: one thread. Values are uint32 and not 0; 0 in an answer says that nobody is left.

    Each value belongs to one page. One that was given to a method which returns values is used up.
    """

    def __init__(self) -> None:
        self._banks: list[Array] = []  # one for each 64 holders, uint64 [rows, tiers]
        self._free = array("I")
        self._rows = 0  # those used so far, free ones included
        self._most_rows = memory_bytes() // 4 // _ROW_BYTES

    @property
    def nbytes(self) -> int:
        return self._rows * _ROW_BYTES * len(self._banks) + 4 * len(self._free)

    @property
    def shared(self) -> int:
        """Pages that more than one holds."""
        return self._rows - len(self._free)

    def bits(self, values: Array, number: int) -> Array:
        """The tiers in which one holder has each page, as bits, uint8."""
        bits = np.where(values >> TIERS == number, values & ALL_TIERS, 0).astype(np.uint8)
        rows = np.flatnonzero(values & _ROW)
        if len(rows) and number < _WORD * len(self._banks):
            words = self._banks[number // _WORD][values[rows] & ~_ROW]
            held = words >> np.uint64(number % _WORD) & np.uint64(1)
            bits[rows] = held.astype(np.uint32) @ _WEIGHTS
        return bits

    def matrix(self, values: Array, holders: int) -> Array:
        """The tiers in which each of the first `holders` has each page, as bits, uint8 [holders, pages]."""
        bits = np.zeros((holders, len(values)), np.uint8)
        alone = np.flatnonzero((values & _ROW) == 0)
        bits[values[alone] >> TIERS, alone] = values[alone] & ALL_TIERS
        rows = np.flatnonzero(values & _ROW)
        if len(rows):
            octets = self._words(values[rows]).astype("<u8", copy=False).view(np.uint8)
            flags = np.unpackbits(octets, axis=2, bitorder="little").reshape(
                len(rows), len(self._banks), TIERS, _WORD
            )
            held = flags[:, :, 0] | flags[:, :, 1] << 1 | flags[:, :, 2] << 2
            held = held.reshape(len(rows), -1).T[:holders]
            bits[: len(held), rows] = held
        return bits

    def add(self, values: Array, number: int, tier: int) -> Array:
        """The same pages, held by `number` in `tier` as well."""
        values = values.copy()
        mine = values >> TIERS == number
        values[mine] |= 1 << tier
        others = ~mine & ((values & _ROW) == 0)
        if others.any():
            values[others] = self._new_rows(values[others])
        if not mine.all():
            self._bank(number)[values[~mine] & ~_ROW, tier] |= np.uint64(1 << number % _WORD)
        return values

    def keep(self, values: Array, kept: Array) -> tuple[Array, Array]:
        """The same pages without the tiers that are not `kept`, bits by holder, uint8 [all holders].

        Also returns how many pages each holder lost by that in each tier, int64 [all holders, tiers].
        """
        values = values.copy()
        lost = np.zeros((len(kept), TIERS), np.int64)
        alone = np.flatnonzero((values & _ROW) == 0)
        numbers = values[alone] >> TIERS
        dropped = values[alone] & ~kept[numbers] & ALL_TIERS
        if dropped.any():
            for tier in range(TIERS):
                lost[:, tier] = np.bincount(numbers[dropped >> tier & 1 == 1], minlength=len(kept))
            left = values[alone] ^ dropped
            values[alone] = np.where(left & ALL_TIERS, left, 0)
        rows = np.flatnonzero(values & _ROW)
        if len(rows):
            values[rows] = self._keep_rows(values[rows], kept, lost)
        return values, lost

    def remove(self, values: Array, number: int, tier: int) -> Array:
        """The same pages, no longer held by `number` in `tier`; all of them are."""
        values = values.copy()
        alone = (values & _ROW) == 0
        left = values[alone] & ~np.uint32(1 << tier)
        values[alone] = np.where(left & ALL_TIERS, left, 0)
        if not alone.all():
            shared = values[~alone]
            self._banks[number // _WORD][shared & ~_ROW, tier] &= ~np.uint64(1 << number % _WORD)
            values[~alone] = self._collapsed(shared)
        return values

    def check(self, values: Array) -> None:
        """Raises AssertionError where two of these values, all there are, share a row, or a row is lost or
        has less than two holders.
        """
        shared = values[(values & _ROW) != 0]
        assert sorted([*(shared & ~_ROW).tolist(), *self._free]) == list(range(self._rows))
        assert len(shared) == self.shared
        if len(shared):
            assert (_count(self._words(shared)) > 1).all()

    def _bank(self, number: int) -> Array:
        while number >= _WORD * len(self._banks):
            self._banks.append(reserved(self._most_rows, TIERS, np.uint64))
            self._most_rows = len(self._banks[-1])
        return self._banks[number // _WORD]

    def _words(self, values: Array) -> Array:
        """The rows of values, uint64 [n, banks, tiers]."""
        rows = values & ~_ROW
        return np.concatenate([bank[rows, None] for bank in self._banks], 1)

    def _new_rows(self, values: Array) -> Array:
        """Rows for pages with one holder each."""
        numbers = (values >> TIERS).astype(np.int64)
        self._bank(int(numbers.max()))
        fresh = max(len(values) - len(self._free), 0)
        if self._rows + fresh > self._most_rows:
            raise JkvError(f"the index is full: {self._rows} shared pages; give the router more memory")
        again = self._free[len(self._free) - len(values) + fresh :]
        del self._free[len(self._free) - len(again) :]
        rows = np.array([*again, *range(self._rows, self._rows + fresh)], np.uint32)
        self._rows += fresh
        one = np.uint64(1) << (numbers % _WORD).astype(np.uint64)
        held = (values[:, None] & _WEIGHTS) != 0
        for bank, words in enumerate(self._banks):
            words[rows] = np.where(held & (numbers // _WORD == bank)[:, None], one[:, None], np.uint64(0))
        return rows | _ROW

    def _keep_rows(self, values: Array, kept: Array, lost: Array) -> Array:
        """As `keep`, for values that are rows; adds to `lost`."""
        rows = values & ~_ROW
        touched = np.zeros(len(values), bool)
        for number in np.flatnonzero(kept[: _WORD * len(self._banks)] != ALL_TIERS):
            bank, bit = self._banks[number // _WORD], np.uint64(1 << int(number) % _WORD)
            for tier in range(TIERS):
                if kept[number] >> tier & 1:
                    continue
                held = (bank[rows, tier] & bit) != 0
                bank[rows[held], tier] &= ~bit
                lost[number, tier] += np.count_nonzero(held)
                touched |= held
        values = values.copy()
        if touched.any():
            values[touched] = self._collapsed(values[touched])
        return values

    def _collapsed(self, values: Array) -> Array:
        """Values without a row for pages that one holder is left of, and 0 for those of nobody."""
        words = self._words(values)
        few = np.flatnonzero(_count(words) < 2)
        if not len(few):
            return values
        self._free.extend((values[few] & ~_ROW).tolist())
        words = words[few]
        left = np.zeros(len(few), np.uint32)
        for bank in range(len(self._banks)):
            union = np.bitwise_or.reduce(words[:, bank], 1)
            number = np.bitwise_count(union - np.uint64(1)) + np.uint32(_WORD * bank)
            tiers = (words[:, bank] != 0).astype(np.uint32) @ _WEIGHTS
            left = np.where(union != 0, number << TIERS | tiers, left)
        values = values.copy()
        values[few] = left
        return values


def _count(words: Array) -> Array:
    """Holders of rows, whose words are [n, banks, tiers]."""
    return np.bitwise_count(np.bitwise_or.reduce(words, 2)).sum(1)
