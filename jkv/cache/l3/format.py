"""A page object's bytes: a header block, then the page. Pure.

The header is `HEADER_BYTES` long, so that the page starts on a block of the file system, little-endian:

    magic            8   b"jkv-page"
    version          u32 jkv.cache.keys.FORMAT_VERSION
    page_size        u32 tokens
    payload_bytes    u64
    model_root       16
    request_root     16
    key              16
    parent           16
    payload checksum 16  xxh3-128
    dtype            16  ASCII, zero-padded
    dimensions       u32
    shape            8 x u64, zero-padded
    tokens           page_size x u32
    zeros
    header checksum  16  xxh3-128 of all header bytes before it

Every byte of an object is covered by one of the checksums, and all objects of a model have one size.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_128_digest

from jkv.cache.keys import FORMAT_VERSION, KEY_BYTES
from jkv.cache.l3.reasons import Reason
from jkv.cache.pages import PageInfo

MAGIC = b"jkv-page"
HEADER_BYTES = 4096
MAX_DIMENSIONS = 8
_CHECKSUM_BYTES = 16
_FIXED = struct.Struct("<8sIIQ16s16s16s16s16s16sI8Q")
_VERSION = struct.Struct("<8sI")
_BODY_BYTES = HEADER_BYTES - _CHECKSUM_BYTES
_MAX_PAGE_SIZE = (_BODY_BYTES - _FIXED.size) // 4


@dataclass(frozen=True, kw_only=True)
class StoreIdentity:
    """What all page objects of one deployment share.

    Raises:
        ValueError: a field that the header has no room for.
    """

    model_root: bytes  # 16 bytes
    kv_dtype: str
    page_shape: tuple[int, ...]
    page_bytes: int
    page_size: int  # tokens

    def __post_init__(self) -> None:
        if len(self.model_root) != KEY_BYTES:
            raise ValueError(f"a model root has {KEY_BYTES} bytes, not {len(self.model_root)}")
        if not self.kv_dtype.isascii() or not 1 <= len(self.kv_dtype) <= 16:
            raise ValueError(f"the KV dtype {self.kv_dtype!r} is not 1 to 16 ASCII characters")
        if not 1 <= len(self.page_shape) <= MAX_DIMENSIONS:
            raise ValueError(f"a page has 1 to {MAX_DIMENSIONS} dimensions, not {len(self.page_shape)}")
        if not 1 <= self.page_size <= _MAX_PAGE_SIZE:
            raise ValueError(f"a page has 1 to {_MAX_PAGE_SIZE} tokens, not {self.page_size}")
        if self.page_bytes < 1:
            raise ValueError(f"a page has bytes, got {self.page_bytes}")

    @property
    def object_bytes(self) -> int:
        return HEADER_BYTES + self.page_bytes

    @property
    def model8(self) -> str:
        """The first 8 hex digits of the model root, which name a model's objects."""
        return self.model_root.hex()[:8]


def encode(identity: StoreIdentity, info: PageInfo, page: np.ndarray) -> bytes:
    """The object of a page given as flat uint8.

    Raises:
        ValueError: the page or its tokens are not as long as the identity says.
    """
    if page.nbytes != identity.page_bytes or len(info.tokens) != 4 * identity.page_size:
        raise ValueError(
            f"a page of {page.nbytes} bytes and {len(info.tokens) // 4} tokens, "
            f"but this store's have {identity.page_bytes} and {identity.page_size}"
        )
    # One copy: header and page have to lie side by side, since a KvStore takes one string of bytes.
    return b"".join((_header(identity, info, xxh3_128_digest(page.data)), page.data))


def verify(identity: StoreIdentity, info: PageInfo, data: bytes | memoryview) -> Reason | None:
    """None where `data` is exactly the object of this page, else the first thing that is wrong with it."""
    if len(data) != identity.object_bytes:
        return Reason.SIZE
    magic, version = _VERSION.unpack_from(data)
    if magic != MAGIC:
        return Reason.CORRUPT
    if version != FORMAT_VERSION:
        return Reason.VERSION
    view = memoryview(data)
    body, checksum = view[:_BODY_BYTES], view[_BODY_BYTES:HEADER_BYTES]
    if xxh3_128_digest(body) != checksum:
        return Reason.CORRUPT
    stored = _FIXED.unpack_from(data)[8]
    if body != _header(identity, info, stored)[:_BODY_BYTES]:
        return Reason.MISMATCH
    return None if xxh3_128_digest(view[HEADER_BYTES:]) == stored else Reason.CORRUPT


def payload(data: bytes | memoryview) -> np.ndarray:
    """The page of a verified object: flat uint8, read-only, a view that keeps `data` alive."""
    return np.frombuffer(data, np.uint8, offset=HEADER_BYTES)


def _header(identity: StoreIdentity, info: PageInfo, payload_checksum: bytes) -> bytes:
    shape = identity.page_shape + (0,) * (MAX_DIMENSIONS - len(identity.page_shape))
    fixed = _FIXED.pack(
        MAGIC,
        FORMAT_VERSION,
        identity.page_size,
        identity.page_bytes,
        identity.model_root,
        info.root,
        info.key,
        info.parent,
        payload_checksum,
        identity.kv_dtype.encode("ascii"),
        len(identity.page_shape),
        *shape,
    )
    body = (fixed + info.tokens).ljust(_BODY_BYTES, b"\0")
    return body + xxh3_128_digest(body)
