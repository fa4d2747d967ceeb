"""The one place where a page's key is made. Equal in every process; the engine and the router import it."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

FORMAT_VERSION = 1
KEY_BYTES = 16
_HASHER = blake2b(digest_size=KEY_BYTES)  # to copy: faster than to make one for each page


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """Everything that two deployments must share for their pages to be interchangeable. `numerics` is empty
    unless a hit must not change one bit: then it names all that bits depend on.
    """

    weights_fingerprint: bytes
    model_config: str  # a canonical rendering of the model's config, rope included
    compute_dtype: str
    kv_dtype: str
    page_size: int
    page_layout: str
    numerics: str = ""

    def root(self) -> bytes:
        """The model root, 16 bytes."""
        return _digest(
            b"jkv.model",
            FORMAT_VERSION.to_bytes(4, "little"),
            self.weights_fingerprint,
            self.model_config.encode(),
            self.compute_dtype.encode(),
            self.kv_dtype.encode(),
            self.page_size.to_bytes(4, "little"),
            self.page_layout.encode(),
            *([self.numerics.encode()] if self.numerics else []),
        )


def request_root(model_root: bytes, *, adapter: str = "", cache_salt: str = "") -> bytes:
    """The start of a request's key chain; requests with different salts share no page."""
    return _digest(b"jkv.request", model_root, adapter.encode(), cache_salt.encode())


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Tokens as little-endian uint32, which is what keys hash and caches keep to compare."""
    if isinstance(tokens, np.ndarray):
        return tokens.astype("<u4").tobytes()
    packed = array("I", tokens)  # three times as fast as by way of an array of numpy's
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full page: blake2b-128 over its parent's key and its packed tokens."""
    return blake2b(parent + pack_tokens(tokens), digest_size=KEY_BYTES).digest()


def page_keys(root: bytes, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Keys of every full page of `tokens`, in order."""
    data = pack_tokens(tokens)
    step = 4 * page_size
    keys: list[bytes] = []
    parent = root
    for start in range(0, len(data) - step + 1, step):
        hasher = _HASHER.copy()
        hasher.update(parent + data[start : start + step])
        parent = hasher.digest()
        keys.append(parent)
    return keys


def _digest(domain: bytes, *fields: bytes) -> bytes:
    # Length prefixes keep ("ab", "c") and ("a", "bc") apart.
    hasher = blake2b(digest_size=KEY_BYTES)
    for field in (domain, *fields):
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    return hasher.digest()
