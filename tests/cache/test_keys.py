from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.cache.keys import ModelIdentity, page_key, page_keys, request_root

IDENTITY = ModelIdentity(
    weights_fingerprint=b"\x01" * 16,
    model_config="config",
    compute_dtype="float32",
    kv_dtype="float32",
    page_size=4,
    page_layout="thd",
)


def test_golden_vectors() -> None:
    root = IDENTITY.root()
    assert root.hex() == "527ceeacada0c006a2ed093cc18aed02"
    assert request_root(root).hex() == "bfb6a7de8a1b24cb4f574636b0bb9fcd"
    assert request_root(root, cache_salt="tenant").hex() == "accdbd79349dc1c87f829f2c8fe74959"
    assert [k.hex() for k in page_keys(request_root(root), range(9), 4)] == [
        "c214abcb0b9468742030a95ea4f90cdc",
        "50840d3f0e02b3c14c6c6fa9b5de1262",
    ]


def test_other_processes_make_the_same_keys() -> None:
    code = "from jkv.cache.keys import page_keys; print(page_keys(b'r' * 16, [1, 2, 3, 4], 2)[1].hex())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == page_keys(b"r" * 16, [1, 2, 3, 4], 2)[1].hex()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights_fingerprint", b"\x02" * 16),
        ("model_config", "other"),
        ("compute_dtype", "bfloat16"),
        ("kv_dtype", "bfloat16"),
        ("page_size", 8),
        ("page_layout", "htd"),
        ("numerics", "tp-2"),
    ],
)
def test_each_field_of_the_identity_counts(field: str, value: object) -> None:
    other = ModelIdentity(**{**IDENTITY.__dict__, field: value})  # type: ignore[arg-type]
    assert other.root() != IDENTITY.root()


def test_fields_cannot_run_into_each_other() -> None:
    assert request_root(b"r", adapter="ab", cache_salt="c") != request_root(
        b"r", adapter="a", cache_salt="bc"
    )


def test_no_salt_is_the_empty_salt() -> None:
    assert request_root(b"r") == request_root(b"r", cache_salt="")


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 7))
def test_keys_chain_page_by_page(tokens: list[int], page_size: int) -> None:
    keys = page_keys(b"root", tokens, page_size)
    assert len(keys) == len(tokens) // page_size
    parent = b"root"
    for i, key in enumerate(keys):
        parent = page_key(parent, tokens[i * page_size : (i + 1) * page_size])
        assert key == parent
