from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from jkv.cache.keys import FORMAT_VERSION
from jkv.cache.l3.format import HEADER_BYTES, StoreIdentity, encode, payload, verify
from jkv.cache.l3.reasons import Reason
from jkv.cache.pages import PageInfo
from tests.cache.l3.pages import chain, content, identity

MODEL = identity()
INFO = chain(MODEL, 2)[1]
OBJECT = encode(MODEL, INFO, content(MODEL, INFO))
VERSION = slice(8, 12)


def reseal(header: bytes) -> bytes:
    """The header with a checksum that fits again."""
    return header[:-16] + xxh3_128_digest(header[:-16])


def test_the_bytes_of_an_object_never_change_unnoticed() -> None:
    """If they must, jkv.cache.keys.FORMAT_VERSION grows: then old pages lie beside the new ones unused."""
    model = StoreIdentity(
        model_root=bytes(range(16)), kv_dtype="float32", page_shape=(2, 4, 1), page_bytes=32, page_size=4
    )
    info = PageInfo(
        key=b"k" * 16, parent=b"p" * 16, root=b"r" * 16, tokens=struct.pack("<4I", 1, 2, 3, 2**32 - 1)
    )
    data = encode(model, info, np.arange(32, dtype=np.uint8))
    assert FORMAT_VERSION == 1
    assert data[:8] == b"jkv-page"
    assert struct.unpack("<IIQ", data[8:24]) == (1, 4, 32)
    assert data[24:88] == bytes(range(16)) + b"r" * 16 + b"k" * 16 + b"p" * 16
    assert data[104:120] == b"float32".ljust(16, b"\0")
    assert struct.unpack("<I8Q", data[120:188]) == (3, 2, 4, 1, 0, 0, 0, 0, 0)
    assert struct.unpack("<4I", data[188:204]) == (1, 2, 3, 2**32 - 1)
    assert data[4096:] == bytes(range(32))
    assert xxh3_128_hexdigest(data) == "5b46fb58deab53bffcc8367d52d14ec4"


def test_a_page_comes_back() -> None:
    assert len(OBJECT) == MODEL.object_bytes
    assert verify(MODEL, INFO, OBJECT) is None
    assert np.array_equal(payload(OBJECT), content(MODEL, INFO))
    assert not payload(OBJECT).flags.writeable


@given(st.integers(0, len(OBJECT) - 1), st.integers(1, 255))
def test_any_changed_byte_is_found(position: int, flip: int) -> None:
    data = bytearray(OBJECT)
    data[position] ^= flip
    expected = Reason.VERSION if position in range(*VERSION.indices(12)) else Reason.CORRUPT
    assert verify(MODEL, INFO, bytes(data)) is expected


@pytest.mark.parametrize("position", [HEADER_BYTES - 1, HEADER_BYTES, len(OBJECT) - 1])
def test_the_edges_of_header_and_page_are_covered(position: int) -> None:
    data = bytearray(OBJECT)
    data[position] ^= 1
    assert verify(MODEL, INFO, bytes(data)) is Reason.CORRUPT


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES, len(OBJECT) - 1])
def test_a_truncated_object_is_found(size: int) -> None:
    assert verify(MODEL, INFO, OBJECT[:size]) is Reason.SIZE


def test_a_longer_object_is_found() -> None:
    assert verify(MODEL, INFO, OBJECT + b"\0") is Reason.SIZE


def test_another_version_is_no_match_even_if_sound() -> None:
    header = bytearray(OBJECT[:HEADER_BYTES])
    header[VERSION] = (FORMAT_VERSION + 1).to_bytes(4, "little")
    assert verify(MODEL, INFO, reseal(bytes(header)) + OBJECT[HEADER_BYTES:]) is Reason.VERSION


@pytest.mark.parametrize(
    "asked",
    [
        replace(INFO, key=b"x" * 16),
        replace(INFO, parent=b"x" * 16),
        replace(INFO, root=b"x" * 16),
        replace(INFO, tokens=INFO.tokens[::-1]),
    ],
)
def test_a_sound_object_of_another_page_is_no_match(asked: PageInfo) -> None:
    assert verify(MODEL, asked, OBJECT) is Reason.MISMATCH


@pytest.mark.parametrize(
    "asking",
    [
        replace(MODEL, model_root=b"x" * 16),
        replace(MODEL, kv_dtype="int32"),
        replace(MODEL, page_shape=(*MODEL.page_shape, 1)),
        replace(MODEL, page_shape=MODEL.page_shape[::-1]),
    ],
)
def test_a_sound_object_of_another_model_is_no_match(asking: StoreIdentity) -> None:
    assert verify(asking, INFO, OBJECT) is Reason.MISMATCH


def test_pages_of_another_size_are_not_encoded() -> None:
    with pytest.raises(ValueError, match="this store's have"):
        encode(MODEL, INFO, np.zeros(MODEL.page_bytes - 1, np.uint8))
    with pytest.raises(ValueError, match="7 tokens"):
        encode(MODEL, replace(INFO, tokens=INFO.tokens[4:]), content(MODEL, INFO))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_root", b"short"),
        ("kv_dtype", ""),
        ("kv_dtype", "f" * 17),
        ("page_shape", ()),
        ("page_shape", (1,) * 9),
        ("page_size", 0),
        ("page_size", 1024),
        ("page_bytes", 0),
    ],
)
def test_an_identity_without_room_in_the_header_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"model root|dtype|dimensions|tokens|bytes"):
        replace(MODEL, **{field: value})
