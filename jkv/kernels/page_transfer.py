"""Moving whole pages between the pool and arrays of their own.

A page on its own has values `[kv_heads, layers, page_size, 2 * head_dim]`, K before V in a row, and where
they are int8 scales `[kv_heads, layers, 2 * page_size]`, K's before V's: the heads of one device are then one
piece. Pages are copied layer by layer, slice by slice, and not with one gather or scatter: XLA:TPU copies a
whole pool of int8 for a scatter, and any pool, twice, for a gather that takes some columns of a row; XLA:CPU
transposes pages before it scatters them. XLA:GPU would start a kernel for each slice, and moves a page with
one kernel where it gets it at once.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jkv.kernels.kv_pool import KvArrays


def gather_pages(
    pool: KvArrays[jax.Array], numbers: jax.Array, *, pages: int, kv_heads: int
) -> tuple[KvArrays[jax.Array], ...]:
    """Copies of the pages `numbers`, int32 `[N]`, each below `pages`, the pool's page count."""

    by_layer = partial(_gather, pages=pages, kv_heads=kv_heads)
    at_once = partial(gather_at_once, pages=pages, kv_heads=kv_heads)

    def gather(i: int) -> KvArrays[jax.Array]:
        return jax.tree.map(
            lambda x: lax.platform_dependent(x, numbers[i], cuda=at_once, default=by_layer), pool
        )

    return tuple(gather(i) for i in range(numbers.shape[0]))


def scatter_pages(
    pool: KvArrays[jax.Array],
    numbers: jax.Array,
    *copies: KvArrays[jax.Array],
    pages: int,
    kv_heads: int,
) -> KvArrays[jax.Array]:
    """Writes N copies that `gather_pages` made into the pages `numbers`, int32 `[N]`, each below `pages`; in
    place where the pool is donated.
    """
    by_layer = partial(_scatter, pages=pages, kv_heads=kv_heads)
    at_once = partial(scatter_at_once, pages=pages)
    for i, copy in enumerate(copies):

        def scatter(x: jax.Array, page: jax.Array, i: int = i) -> jax.Array:
            return lax.platform_dependent(x, numbers[i], page, cuda=at_once, default=by_layer)

        pool = jax.tree.map(scatter, pool, copy)
    return pool


def _gather(pool: jax.Array, number: jax.Array, pages: int, kv_heads: int) -> jax.Array:
    rows, *inner, width = pool.shape
    layers, columns, zeros = rows // pages, width // kv_heads, (0,) * len(inner)

    def copy_layer(layer: jax.Array, page: jax.Array) -> jax.Array:
        row = lax.dynamic_slice(pool, (layer * pages + number, *zeros, 0), (1, *inner, width))[None]
        for head in range(kv_heads):
            part = row[..., head * columns : (head + 1) * columns]
            page = lax.dynamic_update_slice(page, part, (head, layer, *zeros, 0))
        return page

    page = lax.empty((kv_heads, layers, *inner, columns), pool.dtype)
    return lax.fori_loop(0, layers, copy_layer, page)


def _scatter(pool: jax.Array, number: jax.Array, page: jax.Array, pages: int, kv_heads: int) -> jax.Array:
    _, layers, *inner, columns = page.shape
    zeros = (0,) * len(inner)

    def copy_layer(layer: jax.Array, pool: jax.Array) -> jax.Array:
        parts = lax.dynamic_slice(page, (0, layer, *zeros, 0), (kv_heads, 1, *inner, columns))
        for head in range(kv_heads):
            start = (layer * pages + number, *zeros, head * columns)
            pool = lax.dynamic_update_slice(pool, parts[head], start)
        return pool

    return lax.fori_loop(0, layers, copy_layer, pool)


def gather_at_once(pool: jax.Array, number: jax.Array, pages: int, kv_heads: int) -> jax.Array:
    """A page of `[layers * pages, ..., width]` as `[kv_heads, layers, ..., width / kv_heads]`."""
    rows, *inner, width = pool.shape
    page = lax.dynamic_index_in_dim(pool.reshape(rows // pages, pages, *inner, width), number, 1, False)
    return jnp.moveaxis(page.reshape(rows // pages, *inner, kv_heads, width // kv_heads), -2, 0)


def scatter_at_once(pool: jax.Array, number: jax.Array, page: jax.Array, pages: int) -> jax.Array:
    """The inverse of `gather_at_once`."""
    rows, *inner, width = pool.shape
    by_layer = pool.reshape(rows // pages, pages, *inner, width)
    page = jnp.moveaxis(page, 0, -2).reshape(rows // pages, 1, *inner, width)
    return lax.dynamic_update_slice_in_dim(by_layer, page, number, 1).reshape(pool.shape)
