from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.models.fingerprint import SIZE, StoredTensor, derived, fingerprint, sampled_offsets


def tensor(name: str = "w", size: int = 100_000) -> StoredTensor:
    data = (np.arange(size, dtype=np.uint32) * 2654435761 >> 24).astype(np.uint8)
    return StoredTensor(name=name, shape=(size,), dtype="uint8", data=data)


def test_it_is_16_bytes_and_ignores_the_order_of_tensors() -> None:
    a, b = tensor("a"), tensor("b", 5000)
    assert len(fingerprint([a, b])) == SIZE == 16
    assert fingerprint([a, b]) == fingerprint([b, a])


def test_it_is_equal_in_another_process() -> None:
    code = (
        "from tests.models.test_fingerprint import tensor\n"
        "from jkv.models.fingerprint import fingerprint\n"
        "print(fingerprint([tensor()]).hex())"
    )
    root = Path(__file__).parents[2]
    other = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == fingerprint([tensor()]).hex()


@pytest.mark.parametrize(
    "change",
    [{"name": "v"}, {"dtype": "int8"}, {"shape": (10, 10_000)}, {"data": tensor(size=99_999).data}],
)
def test_it_covers_names_shapes_dtypes_and_sizes(change: dict[str, Any]) -> None:
    assert fingerprint([replace(tensor(), **change)]) != fingerprint([tensor()])


@given(size=st.integers(1, 200_000), block=st.integers(0, 8), byte=st.integers(0, 4095))
def test_it_changes_with_any_sampled_byte(size: int, block: int, byte: int) -> None:
    before = tensor(size=size)
    offsets = sampled_offsets(size)
    at = min(offsets[block % len(offsets)] + byte, size - 1)
    data = before.data.copy()
    data[at] ^= 1
    assert fingerprint([replace(before, data=data)]) != fingerprint([before])


@given(size=st.integers(0, 10_000_000))
def test_samples_stay_inside_and_touch_both_ends(size: int) -> None:
    offsets = sampled_offsets(size)
    assert len(offsets) <= 9
    assert offsets == sorted(set(offsets))
    if size:
        assert offsets[0] == 0
        assert offsets[-1] < size <= offsets[-1] + 4096


def test_a_change_of_values_derives_another_fingerprint() -> None:
    original = fingerprint([tensor()])
    assert len({original, derived(original, "bfloat16"), derived(original, "float16")}) == 3
