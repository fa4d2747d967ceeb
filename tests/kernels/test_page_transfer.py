from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.kernels.kv_pool import KvArrays, PoolShape, stored_dtype
from jkv.kernels.page_transfer import gather_at_once, gather_pages, scatter_at_once, scatter_pages

_LAYERS, _PAGES, _HEADS, _DIM = 3, 7, 2, 16

in_every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
of_every_size = pytest.mark.parametrize("page_size", [8, 16, 64])


@in_every_dtype
@of_every_size
def test_a_page_has_its_heads_in_front_then_its_layers_and_tokens(dtype: str, page_size: int) -> None:
    shape = _shape(dtype, page_size)
    pool = _pool(shape)
    values = np.asarray(pool.values).reshape(_LAYERS, _PAGES, page_size, _HEADS, 2 * _DIM)
    numbers = [5, 0, 6]
    for page, number in zip(_gather(shape)(pool, np.array(numbers, np.int32)), numbers, strict=True):
        assert jax.eval_shape(lambda x: x, page) == shape.abstract_page()
        assert page.nbytes == shape.page_bytes
        assert (np.asarray(page.values) == values[:, number].transpose(2, 0, 1, 3)).all()
        if pool.scales is not None:
            scales = np.asarray(pool.scales).reshape(_LAYERS, _PAGES, _HEADS, 2 * page_size)
            assert (np.asarray(page.scales) == scales[:, number].transpose(1, 0, 2)).all()


@in_every_dtype
@of_every_size
def test_pages_are_put_back_where_asked_and_nothing_else_changes(dtype: str, page_size: int) -> None:
    shape = _shape(dtype, page_size)
    pool = _pool(shape)
    copies = _gather(shape)(pool, np.array([5, 0, 6], np.int32))
    wants = [np.array(x).reshape(_LAYERS, _PAGES, -1) for x in jax.tree.leaves(pool)]
    after = _scatter(shape)(pool, np.array([2, 6, 0], np.int32), *copies)
    for array, want in zip(jax.tree.leaves(after), wants, strict=True):
        want[:, [2, 6, 0]] = want[:, [5, 0, 6]]
        assert array.dtype == want.dtype
        assert np.asarray(array).tobytes() == want.tobytes()


@in_every_dtype
def test_a_page_moved_at_once_is_the_same(dtype: str) -> None:
    shape = _shape(dtype, 16)
    pool, number = _pool(shape), jnp.int32(5)
    (copy,) = _gather(shape)(pool, np.array([5], np.int32))
    for array, page in zip(jax.tree.leaves(pool), jax.tree.leaves(copy), strict=True):
        at_once = gather_at_once(array, number, pages=_PAGES, kv_heads=_HEADS)
        assert (at_once == page).all()
        want = np.array(array).reshape(_LAYERS, _PAGES, -1)
        want[:, 2] = want[:, 5]
        after = scatter_at_once(array, jnp.int32(2), page, pages=_PAGES)
        assert after.shape == array.shape
        assert (np.asarray(after).reshape(want.shape) == want).all()


@in_every_dtype
@pytest.mark.parametrize("count", [1, 4])
def test_pages_move_without_a_copy_of_the_pool(dtype: str, count: int) -> None:
    shape = _shape(dtype, 64, pages=2048)
    pool, pages = shape.abstract_pool(), [shape.abstract_page()] * count
    numbers = jax.ShapeDtypeStruct((count,), jnp.int32)
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


def _pool(shape: PoolShape) -> KvArrays[jax.Array]:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.integers(-100, 100, x.shape).astype(x.dtype)), shape.abstract_pool()
    )


def _gather(shape: PoolShape) -> jax.stages.Wrapped:
    return jax.jit(partial(gather_pages, pages=shape.pages, kv_heads=shape.kv_heads))


def _scatter(shape: PoolShape) -> jax.stages.Wrapped:
    run = partial(scatter_pages, pages=shape.pages, kv_heads=shape.kv_heads)
    return jax.jit(run, donate_argnums=0)
