from __future__ import annotations

from typing import get_args

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.kernels import cpu_library
from jkv.kernels.cpu_product import BLOCK, Encoding, PanelWeight, can_encode, panel_product, words

pytestmark = pytest.mark.skipif(not cpu_library.available(), reason="no C++ compiler")

_ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)


def _weight(rng: np.random.Generator, outputs: int, inputs: int, encoding: Encoding) -> PanelWeight:
    """Of random words, where these are finite numbers."""
    if encoding == "float32":
        rows = rng.standard_normal((outputs, inputs), dtype=np.float32).view(np.uint32)
    elif encoding == "bfloat16":
        rows = rng.standard_normal((outputs, inputs)).astype(ml_dtypes.bfloat16).view(np.uint32)
    else:
        codes, scales = (8, 1) if encoding == "int8" else (4, 2)
        blocks = rng.integers(0, 2**32, (outputs, inputs // BLOCK, codes), dtype=np.uint32)
        ends = rng.standard_normal((outputs, inputs // BLOCK, scales), dtype=np.float32) / 2**codes
        rows = np.concatenate([blocks, ends.view(np.uint32)], axis=2).reshape(outputs, -1)
    assert rows.shape[1] == words(inputs, encoding)
    return PanelWeight.pack(rows, encoding)


def _values(weight: PanelWeight) -> np.ndarray:
    """float32 `[outputs, inputs]`."""
    device = PanelWeight(words=jnp.asarray(weight.words), outputs=weight.outputs, encoding=weight.encoding)
    return np.asarray(device.rows(jnp.arange(weight.outputs)))


@settings(max_examples=80, deadline=None)
@given(
    # Decoded while they are multiplied, before, and for a second piece of rows.
    rows=st.one_of(st.integers(1, 80), st.sampled_from([512, 515])),
    # What is left of a block, and more than is decoded at once.
    inputs=st.sampled_from([1, 2, 15, 32, 36, 96, 224, 576, 768, 802, 1536]),
    outputs=st.sampled_from([1, 15, 16, 17, 33, 47, 48, 100, 193]),
    encoding=st.sampled_from(_ENCODINGS),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_float64(rows: int, inputs: int, outputs: int, encoding: Encoding, seed: int) -> None:
    if not can_encode(inputs, encoding):
        encoding = "float32"
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, inputs), dtype=np.float32)
    weight = _weight(rng, outputs, inputs, encoding)
    values = _values(weight).astype(np.float64)
    got = panel_product(jnp.asarray(x), weight)
    scale = np.abs(values).max() * inputs**0.5
    np.testing.assert_allclose(got, x.astype(np.float64) @ values.T, rtol=0, atol=4e-6 * scale + 1e-6)


@pytest.mark.parametrize("encoding", _ENCODINGS)
def test_codes_are_what_the_encoding_says(encoding: Encoding) -> None:
    rng = np.random.default_rng(0)
    weight = _weight(rng, 20, 64, encoding)
    rows = weight.words.swapaxes(1, 2).reshape(-1, weight.words.shape[1])[:20]
    if encoding == "float32":
        want = rows.view(np.float32)
    elif encoding == "bfloat16":
        want = rows.view(ml_dtypes.bfloat16).astype(np.float32)
    else:
        blocks = np.ascontiguousarray(rows.reshape(20, 2, -1))
        if encoding == "int8":
            codes = np.ascontiguousarray(blocks[:, :, :8]).view(np.int8)
            scale, least = blocks[:, :, 8:].view(np.float32), np.float32(0)
        else:
            halves = np.ascontiguousarray(blocks[:, :, :4]).view(np.uint8)
            codes = np.concatenate([halves & 15, halves >> 4], axis=2)
            scale, least = blocks[:, :, 4:5].view(np.float32), blocks[:, :, 5:].view(np.float32)
        exact = codes.astype(np.float64) * scale.astype(np.float64) + least
        want = exact.astype(np.float32).reshape(20, 64)
    np.testing.assert_allclose(_values(weight), want, rtol=1e-6)
    # The kernel's own decoding, by a product with ones and zeros.
    np.testing.assert_allclose(panel_product(jnp.eye(64), weight).T, want, rtol=1e-6)
    np.testing.assert_allclose(panel_product(jnp.eye(64)[:3], weight).T, want[:, :3], rtol=1e-6)


def test_a_row_s_nan_stays_in_its_row() -> None:
    x = np.ones((9, 64), np.float32)
    x[3, 5] = np.nan
    weight = PanelWeight.pack(np.ones((50, 64), np.float32).view(np.uint32), "float32")
    out = np.asarray(panel_product(jnp.asarray(x), weight))
    assert np.isnan(out[3]).all()
    assert (np.delete(out, 3, axis=0) == 64).all()


@pytest.mark.parametrize("encoding", _ENCODINGS)
def test_a_row_s_bits_do_not_depend_on_the_others(encoding: Encoding) -> None:
    rng = np.random.default_rng(0)
    inputs = 1600
    x = rng.standard_normal((530, inputs), dtype=np.float32)
    weight = _weight(rng, 97, inputs, encoding)
    together = np.asarray(panel_product(jnp.asarray(x), weight))
    for rows in (1, 2, 4, 5, 7, 8, 9, 11, 64, 65, 512):
        np.testing.assert_array_equal(panel_product(jnp.asarray(x[:rows]), weight), together[:rows])
