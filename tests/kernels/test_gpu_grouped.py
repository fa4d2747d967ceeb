"""The GPU's product of experts, interpreted on CPU, against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jkv.kernels.gpu_grouped import grouped_product
from jkv.kernels.gpu_grouped_tiles import GroupedTiles

_ROWS, _EXPERTS = 96, 5
# Even and uneven in both of the weights' axes.
_SHAPES = pytest.mark.parametrize("shape", [(64, 96), (80, 96), (64, 72), (17, 5)], ids=str)
_TILES = GroupedTiles(rows=16, columns=32, depth=32, warps=4, stages=2, interpret=True)


@st.composite
def group_sizes(draw: st.DrawFn) -> list[int]:
    """Of which some are empty, and that may leave rows without a group."""
    busy = draw(st.lists(st.booleans(), min_size=_EXPERTS, max_size=_EXPERTS))
    left, sizes = _ROWS, []
    for has_rows in busy:
        sizes.append(draw(st.integers(1, left)) if has_rows and left else 0)
        left -= sizes[-1]
    return sizes


@cache
def _compiled(dtype: str, rows: int = _ROWS) -> Callable[..., jax.Array]:
    del dtype, rows  # jax compiles for each
    return jax.jit(partial(grouped_product, tiles=_TILES))


def _product(rows: np.ndarray, weights: np.ndarray, sizes: Sequence[int], dtype: str) -> np.ndarray:
    x, w = jnp.asarray(rows, dtype), jnp.asarray(weights, dtype)
    out = _compiled(dtype)(x, w, jnp.asarray(sizes, jnp.int32))
    assert out.dtype == dtype
    return np.asarray(out)[: sum(sizes)].astype(np.float64)


@_SHAPES
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-5), ("bfloat16", 2**-8)])
@settings(max_examples=25, deadline=None)
@given(sizes=group_sizes(), seed=st.integers(0, 2**32 - 1))
@example(sizes=[0, 0, 96, 0, 0], seed=0)
@example(sizes=[0, 0, 0, 0, 0], seed=0)
@example(sizes=[17, 17, 17, 17, 28], seed=0)  # the most tiles that there can be
def test_equals_float64_whatever_others_have(
    shape: tuple[int, int], dtype: str, error: float, sizes: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    stored = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    rows = rng.normal(size=(_ROWS, shape[0])).astype(stored)
    weights = rng.normal(size=(_EXPERTS, *shape)).astype(stored)
    owners = np.repeat(np.arange(_EXPERTS), sizes)
    want = np.einsum("ti,tio->to", rows[: len(owners)].astype(np.float64), weights[owners].astype(np.float64))
    # Nobody reads rows without an expert, or the weights of an expert without rows.
    rows[len(owners) :] = np.nan
    weights[np.asarray(sizes) == 0] = np.nan
    out = _product(rows, weights, sizes, dtype)
    np.testing.assert_allclose(out, want, rtol=error, atol=error * np.abs(want).max(initial=0))


def test_a_row_has_the_same_bits_wherever_it_stands() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(_ROWS, 64)).astype(np.float32)
    weights = rng.normal(size=(_EXPERTS, 64, 96)).astype(np.float32)
    alone = _product(rows, weights, [0, _ROWS, 0, 0, 0], "float32")
    for before, count in ((0, 1), (1, 40), (33, 17), (50, 46)):
        other = np.concatenate([rng.normal(size=(before, 64)).astype(np.float32), rows])[:_ROWS]
        out = _product(other, weights, [before, count, _ROWS - before - count, 0, 0], "float32")
        assert out[before : before + count].tobytes() == alone[:count].tobytes()


def test_fewer_rows_than_a_tile_has_and_more_experts_than_rows() -> None:
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(2, 64)).astype(np.float32)
    weights = rng.normal(size=(40, 64, 32)).astype(np.float32)
    sizes = np.zeros(40, np.int32)
    sizes[[3, 39]] = 1
    out = _compiled("float32", 2)(rows, weights, sizes)
    np.testing.assert_allclose(out, np.einsum("ti,tio->to", rows, weights[[3, 39]]), rtol=1e-5, atol=1e-5)
