"""Token ids of texts that came before, within bounds. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

_HASH_BYTES = 16
# What an entry takes besides its ids: the hash, the array and their places in the dict.
_ENTRY_BYTES = 350


class TokenCache:
    """Token ids by what they were made of: the text and the template, of any length, as bytes.

    Keeps a hash of it and 4 bytes a token. The least recently used goes first. Owner: one thread.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.nbytes = self.hits = self.misses = 0
        self._capacity = capacity_bytes
        self._entries: OrderedDict[bytes, np.ndarray] = OrderedDict()

    def get(self, source: bytes) -> list[int] | None:
        """The ids, or None where they are not known."""
        digest = _digest(source)
        ids = self._entries.get(digest)
        if ids is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(digest)
        return ids.tolist()

    def put(self, source: bytes, ids: Sequence[int]) -> None:
        """Keeps ids, unless they alone are more than all that it may keep."""
        digest, kept = _digest(source), np.asarray(ids, np.uint32)
        if kept.nbytes + _ENTRY_BYTES > self._capacity:
            return
        if digest not in self._entries:
            self._entries[digest] = kept
            self.nbytes += kept.nbytes + _ENTRY_BYTES
        self._entries.move_to_end(digest)
        while self.nbytes > self._capacity:
            _, oldest = self._entries.popitem(last=False)
            self.nbytes -= oldest.nbytes + _ENTRY_BYTES


def _digest(source: bytes) -> bytes:
    return blake2b(source, digest_size=_HASH_BYTES).digest()
