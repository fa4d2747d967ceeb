"""16 bytes that tell one set of weights from another without reading all of it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

SIZE = 16
_DOMAIN = b"jkv weights 1"
_BLOCK = 4096  # bytes: one page of the page cache
_BLOCKS = 9  # per tensor: first and last, the middle and six between them


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor as its file stores it; `data` is uint8 `[bytes]`, usually a view of a mapped file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: np.ndarray


def fingerprint(tensors: Iterable[StoredTensor]) -> bytes:
    """blake2b over names, shapes, dtypes, sizes and sampled 4 KiB blocks of all tensors, ordered by name.

    Tensors of up to 36 KiB are hashed whole. Equal in every process and on every machine.
    """
    state = hashlib.blake2b(_DOMAIN, digest_size=SIZE)
    for tensor in sorted(tensors, key=lambda t: t.name):
        _text(state, tensor.name)
        _text(state, tensor.dtype)
        state.update(
            struct.pack(f"<{len(tensor.shape) + 2}Q", len(tensor.shape), *tensor.shape, tensor.data.size)
        )
        for start in sampled_offsets(tensor.data.size):
            state.update(tensor.data[start : start + _BLOCK].tobytes())
    return state.digest()


def derived(original: bytes, change: str) -> bytes:
    """The fingerprint of weights made from others by a change of values, such as rounding to bfloat16."""
    state = hashlib.blake2b(_DOMAIN + b" derived", digest_size=SIZE)
    state.update(original)
    _text(state, change)
    return state.digest()


def sampled_offsets(size: int) -> list[int]:
    """Where the sampled blocks of `size` bytes start, ascending; up to `_BLOCKS` blocks they cover it all."""
    if size <= _BLOCK * _BLOCKS:
        return list(range(0, size, _BLOCK))
    return [(size - _BLOCK) * i // (_BLOCKS - 1) for i in range(_BLOCKS)]


def _text(state: hashlib.blake2b, text: str) -> None:
    encoded = text.encode()
    state.update(struct.pack("<Q", len(encoded)))
    state.update(encoded)
