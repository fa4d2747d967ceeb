from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.kernels.kv_pool import PoolShape, stored_dtype, to_stored
from jkv.kernels.page_transfer import gather_pages, scatter_pages

_LAYERS, _PAGES, _HEADS, _DIM = 3, 7, 2, 16

in_every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
of_every_size = pytest.mark.parametrize("page_size", [8, 16, 64])


@in_every_dtype
@of_every_size
def test_a_page_has_its_heads_in_front_then_its_layers_and_tokens(dtype: str, page_size: int) -> None:
    shape = _shape(dtype, page_size)
    pool = _pool(shape)
    by_layer = np.asarray(pool).reshape(_LAYERS, _PAGES, page_size, _HEADS, 2 * _DIM)
    numbers = [5, 0, 6]
    for array, number in zip(_gather(shape)(pool, np.array(numbers, np.int32)), numbers, strict=True):
        assert array.shape == shape.page_shape
        assert array.dtype == shape.dtype
        assert array.nbytes == shape.page_bytes
        assert (np.asarray(array) == by_layer[:, number].transpose(2, 0, 1, 3)).all()


@in_every_dtype
@of_every_size
def test_pages_are_put_back_where_asked_and_nothing_else_changes(dtype: str, page_size: int) -> None:
    shape = _shape(dtype, page_size)
    pool = _pool(shape)
    arrays = _gather(shape)(pool, np.array([5, 0, 6], np.int32))
    want = np.array(pool).reshape(_LAYERS, _PAGES, -1)
    want[:, [2, 6, 0]] = want[:, [5, 0, 6]]
    after = _scatter(shape)(pool, np.array([2, 6, 0], np.int32), *arrays)
    assert after.dtype == pool.dtype
    assert np.asarray(after).tobytes() == want.tobytes()


@in_every_dtype
@pytest.mark.parametrize("count", [1, 4])
def test_pages_move_without_a_copy_of_the_pool(dtype: str, count: int) -> None:
    shape = _shape(dtype, 64, pages=2048)
    pool = jax.ShapeDtypeStruct(shape.shape, shape.dtype)
    numbers = jax.ShapeDtypeStruct((count,), jnp.int32)
    pages = [jax.ShapeDtypeStruct(shape.page_shape, shape.dtype)] * count
    gather = _gather(shape).lower(pool, numbers).compile().memory_analysis()
    scatter = _scatter(shape).lower(pool, numbers, *pages).compile().memory_analysis()
    assert gather is not None
    assert scatter is not None
    assert gather.temp_size_in_bytes < 2 * count * shape.page_bytes
    assert scatter.temp_size_in_bytes < 2 * count * shape.page_bytes
    assert scatter.alias_size_in_bytes == shape.pages * shape.page_bytes


def _shape(dtype: str, page_size: int, pages: int = _PAGES) -> PoolShape:
    return PoolShape(
        layers=_LAYERS,
        pages=pages,
        page_size=page_size,
        kv_heads=_HEADS,
        head_dim=_DIM,
        dtype=stored_dtype(dtype, "cpu"),
    )


def _pool(shape: PoolShape) -> jax.Array:
    values = np.random.default_rng(0).normal(scale=50, size=shape.shape).astype(np.float32)
    return to_stored(jnp.asarray(values), shape.dtype)


def _gather(shape: PoolShape) -> jax.stages.Wrapped:
    return jax.jit(partial(gather_pages, pages=shape.pages, kv_heads=shape.kv_heads))


def _scatter(shape: PoolShape) -> jax.stages.Wrapped:
    run = partial(scatter_pages, pages=shape.pages, kv_heads=shape.kv_heads)
    return jax.jit(run, donate_argnums=0)
