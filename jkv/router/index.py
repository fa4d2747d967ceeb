"""The global index: which engine holds which page, in which tiers. Pure: no I/O, no clock.

A holder is an engine, or an owner of L3 pages whose engine is away; an engine may read the L3 pages of others
too, where they share a store. A prompt's pages are a chain, and one that lacks a page cannot use those after
it. Nothing says that a holder has no holes: tiers evict leaves first, each for itself, but writes to L3 may
be dropped, and changes come in any order. So a prefix ends at the first page that no tier of the engine has,
which is not what a binary search would find. All pages of a prompt are looked up at once instead.

Pages are known by the first 8 bytes of their keys. Among ten million pages a page that is not there is taken
for another with probability 5e-13, and two of them are confused with probability 3e-6; what follows is a
request sent to the wrong engine, which compares whole keys and tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jkv.cache.keys import KEY_BYTES
from jkv.cache.pages import Tier
from jkv.router.holders import ALL_TIERS, TIERS, Holders, single
from jkv.router.page_table import PageTable

_BIT = {tier: number for number, tier in enumerate(Tier)}  # the nearest tier first, as in Holders
_BITS = np.array([1 << bit for bit in range(TIERS)], np.uint8)[:, None, None]
_NONE = -1  # the number of a tier without pages
_NO_NUMBERS = [_NONE] * TIERS
_SWEPT_AT_ONCE = 4096  # slots: less than a millisecond
_LOOKED_UP_AT_ONCE = 256  # pages of a prompt

Array = np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class TierDigest:
    """How many pages, and the exclusive or of the first 8 bytes of their keys, little-endian."""

    pages: int
    checksum: int


class HolderPages:
    """What the index has of one holder. Keys are of 16 bytes each, back to back.

    A call takes time by its keys, about a millisecond for a thousand; `clear` and `drop` take none.
    """

    def __init__(self, index: GlobalIndex) -> None:
        self._index = index
        # Under which number its pages of each tier are filed; a tier that was cleared gets another one.
        self._numbers = [_NONE] * TIERS
        self._checksums = [0] * TIERS

    def update(self, tier: Tier, added: bytes, removed: bytes) -> None:
        """Forgets the removed keys, then files the added ones, whichever it had before.

        Raises:
            JkvError: the index is full.
        """
        bit = _BIT[tier]
        if removed and (number := self._numbers[bit]) != _NONE:
            self._checksums[bit] ^= self._index._remove(number, bit, np.unique(page_hashes(removed)))
        if added:
            self._checksums[bit] ^= self._index._add(self._number(bit), bit, np.unique(page_hashes(added)))
        self._index.sweep()

    def clear(self, tiers: Sequence[Tier]) -> None:
        """Forgets these tiers at once; what they take in memory is given back bit by bit."""
        for bit in (_BIT[tier] for tier in tiers):
            if (number := self._numbers[bit]) != _NONE:
                self._index._forget(number, bit)
            self._numbers[bit], self._checksums[bit] = _NONE, 0

    def digest(self) -> dict[Tier, TierDigest]:
        """Of each tier, to compare with the engine's own."""
        return {
            tier: TierDigest(pages=self._index._count(self._numbers[bit], bit), checksum=self._checksums[bit])
            for tier, bit in _BIT.items()
        }

    def _number(self, bit: int) -> int:
        if self._numbers[bit] == _NONE:
            self._numbers[bit] = self._index._take_number(bit, max(self._numbers))
        return self._numbers[bit]


class GlobalIndex:
    """Holders by name. Owner: one thread."""

    def __init__(self) -> None:
        self._table, self._holders = PageTable(), Holders()
        self._members: dict[str, HolderPages] = {}
        # By number: the tiers that are in use, as bits, and how many pages are filed in each, in use or not.
        self._kept = np.zeros(0, np.uint8)
        self._filed = np.zeros((0, TIERS), np.int64)
        self._cursor = 0

    @property
    def pages(self) -> int:
        """Different ones, those included that nobody holds any more and that have not been swept yet."""
        return self._table.used

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return self._table.nbytes + self._holders.nbytes

    def holder(self, name: str) -> HolderPages:
        """What is known of a holder, which is there from now on."""
        return self._members.setdefault(name, HolderPages(self))

    def drop(self, name: str) -> None:
        """Forgets a holder, and all that it held."""
        if (member := self._members.pop(name, None)) is not None:
            member.clear(tuple(Tier))

    def match(
        self, pages: Array, engines: Sequence[str], shared_l3: Mapping[str, Sequence[str]] | None = None
    ) -> Array:
        """The longest prefix of a prompt that each of these engines, at least one, can use.

        Its pages are counted in the nearest tier: int64 [tiers, engines]. `pages` are the prompt's full ones,
        see `page_hashes`. `shared_l3` names for an engine the other holders whose L3 pages it can read.
        """
        held = self._held(pages)
        numbers = np.array([self._numbers_of(engine) for engine in engines])
        have = np.zeros((len(engines), held.shape[1]), np.uint8)
        for bit in range(TIERS):
            have |= held[numbers[:, bit]] & np.uint8(1 << bit)
        if shared_l3:
            self._add_shared(held, have, engines, shared_l3)
        return _prefixes(have)

    def sweep(self) -> bool:
        """Gives back a little of what forgotten tiers take; whether there may be more. Call it when idle."""
        unused = (self._kept[:, None] >> np.arange(TIERS, dtype=np.uint8) & 1) == 0
        if not self._filed[unused].any():
            return False
        if self._cursor >= self._table.slots:
            self._cursor = 0
        slots = self._cursor + np.flatnonzero(
            self._table.values[self._cursor : self._cursor + _SWEPT_AT_ONCE]
        )
        self._cursor += _SWEPT_AT_ONCE
        self._keep(slots)
        return True

    def check(self) -> None:
        """Raises AssertionError where the index contradicts itself."""
        self._table.check()
        values = self._table.values[np.flatnonzero(self._table.keys)]
        self._holders.check(values)
        bits = self._holders.matrix(values, len(self._kept))
        assert (bits.any(0)).all()
        for tier in range(TIERS):
            assert ((bits >> tier & 1).sum(1) == self._filed[:, tier]).all()

    def _numbers_of(self, engine: str) -> list[int]:
        """By tier; `_NONE` where it has no pages."""
        member = self._members.get(engine)
        return _NO_NUMBERS if member is None else member._numbers

    def _held(self, hashes: Array) -> Array:
        """Tiers by holder's number as bits, uint8 [numbers + 1, pages], up to the first page that is unknown.

        The last row, which is that of `_NONE`, is 0.
        """
        found = list(self._look_up(hashes))
        values = np.concatenate(found) if found else np.zeros(0, np.uint32)
        return self._holders.matrix(values, len(self._kept) + 1)

    def _look_up(self, hashes: Array) -> Iterator[Array]:
        for start in range(0, len(hashes), _LOOKED_UP_AT_ONCE):
            slots = self._table.find(hashes[start : start + _LOOKED_UP_AT_ONCE])
            missing = np.flatnonzero(slots < 0)
            if len(missing):
                slots = slots[: missing[0]]
            yield self._table.values[slots]
            if len(missing):
                return

    def _add_shared(
        self, held: Array, have: Array, engines: Sequence[str], shared_l3: Mapping[str, Sequence[str]]
    ) -> None:
        """Adds the L3 pages of others; engines that read the same stores are treated as one."""
        bit = _BIT[Tier.L3]
        groups: dict[tuple[str, ...], list[int]] = {}
        for row, engine in enumerate(engines):
            if others := shared_l3.get(engine):
                groups.setdefault(tuple(others), []).append(row)
        for others, rows in groups.items():
            numbers = [self._numbers_of(other)[bit] for other in others]
            have[rows] |= np.bitwise_or.reduce(held[numbers], axis=0) & np.uint8(1 << bit)

    def _add(self, number: int, tier: int, hashes: Array) -> int:
        """Files pages; returns the exclusive or of those that are new there."""
        slots = self._table.find(hashes)
        if self._table.reserve(int((slots < 0).sum())):  # fails before anything is changed
            slots = self._table.find(hashes)
        known = slots >= 0
        old = self._keep(slots[known])
        left = old != 0
        # Of the others nobody held any more; their slots are free again.
        known[known] = left
        old, slots = old[left], slots[known]
        had = (self._holders.bits(old, number) & 1 << tier) != 0
        self._table.values[slots[~had]] = self._holders.add(old[~had], number, tier)
        fresh = hashes[~known]
        self._table.insert(fresh, np.full(len(fresh), single(number, tier), np.uint32))
        new = np.concatenate((hashes[known][~had], fresh))
        self._filed[number, tier] += len(new)
        return int(np.bitwise_xor.reduce(new))

    def _remove(self, number: int, tier: int, hashes: Array) -> int:
        """Forgets pages; returns the exclusive or of those that were there."""
        slots = self._table.find(hashes)
        found = slots >= 0
        hashes, slots = hashes[found], slots[found]
        had = (self._holders.bits(self._table.values[slots], number) & 1 << tier) != 0
        hashes, slots = hashes[had], slots[had]
        self._store(slots, self._holders.remove(self._table.values[slots], number, tier))
        self._filed[number, tier] -= len(slots)
        return int(np.bitwise_xor.reduce(hashes))

    def _keep(self, slots: Array) -> Array:
        """Clears forgotten tiers out of these slots; returns what is left there, 0 where nothing is."""
        values, lost = self._holders.keep(self._table.values[slots], self._kept)
        self._store(slots, values)
        self._filed -= lost
        return values

    def _store(self, slots: Array, values: Array) -> None:
        self._table.values[slots] = values
        self._table.remove(slots[values == 0])

    def _take_number(self, tier: int, used: int) -> int:
        """A number for a holder's pages of a tier: the one of its other tiers, unless old pages have it."""
        if used == _NONE or self._filed[used, tier]:
            free = np.flatnonzero((self._kept == 0) & (self._filed == 0).all(1))
            used = int(free[0]) if len(free) else len(self._kept)
            if not len(free):
                self._kept = np.append(self._kept, np.uint8(0))
                self._filed = np.concatenate((self._filed, np.zeros((1, TIERS), np.int64)))
        self._kept[used] |= 1 << tier
        return used

    def _forget(self, number: int, tier: int) -> None:
        self._kept[number] &= ALL_TIERS & ~(1 << tier)

    def _count(self, number: int, tier: int) -> int:
        return 0 if number == _NONE else int(self._filed[number, tier])


def page_hashes(keys: bytes) -> Array:
    """What pages are known by: uint64, in order of their keys, which are of 16 bytes each, back to back."""
    if len(keys) % KEY_BYTES:
        raise ValueError(f"keys are of {KEY_BYTES} bytes each, got {len(keys)} bytes")
    hashes = np.frombuffer(keys, "<u8")[::2].astype(np.uint64, copy=False)
    return np.maximum(hashes, np.uint64(1))  # 0 marks free slots


def _prefixes(have: Array) -> Array:
    """Pages of prefixes by nearest tier, from tiers as bits, [engines, pages]."""
    prefix = np.logical_and.accumulate(have != 0, axis=1)
    nearest = np.where(prefix, have & (~have + np.uint8(1)), np.uint8(0))  # the lowest bit
    return (nearest == _BITS).sum(2)
