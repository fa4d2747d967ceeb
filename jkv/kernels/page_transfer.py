"""Moving whole pages between the pool and arrays of their own.

A page on its own is `[kv_heads, layers, page_size, 2 * head_dim]`, K before V in a row: whatever heads a
device holds of it are then one piece. Pages are copied layer by layer, slice by slice, and not with one
gather or scatter: XLA:TPU copies a whole pool of int8 for a scatter, and any pool, twice, for a gather that
takes some columns of a row; XLA:CPU transposes pages before it scatters them.
"""

from __future__ import annotations

import jax
from jax import lax


def gather_pages(pool: jax.Array, numbers: jax.Array, *, pages: int, kv_heads: int) -> tuple[jax.Array, ...]:
    """Copies of the pages `numbers`, int32 `[N]`, each below `pages`, the pool's page count."""
    return tuple(_gather(pool, numbers[i], pages, kv_heads) for i in range(numbers.shape[0]))


def scatter_pages(
    pool: jax.Array, numbers: jax.Array, *arrays: jax.Array, pages: int, kv_heads: int
) -> jax.Array:
    """Writes N arrays that `gather_pages` made into the pages `numbers`, int32 `[N]`, each below `pages`; in
    place where the pool is donated.
    """
    for i, array in enumerate(arrays):
        pool = _scatter(pool, numbers[i], array, pages, kv_heads)
    return pool


def _gather(pool: jax.Array, number: jax.Array, pages: int, kv_heads: int) -> jax.Array:
    rows, page_size, width = pool.shape
    layers, columns = rows // pages, width // kv_heads

    def copy_layer(layer: jax.Array, array: jax.Array) -> jax.Array:
        row = lax.dynamic_slice(pool, (layer * pages + number, 0, 0), (1, page_size, width))[None]
        for head in range(kv_heads):
            part = row[..., head * columns : (head + 1) * columns]
            array = lax.dynamic_update_slice(array, part, (head, layer, 0, 0))
        return array

    array = lax.empty((kv_heads, layers, page_size, columns), pool.dtype)
    return lax.fori_loop(0, layers, copy_layer, array)


def _scatter(pool: jax.Array, number: jax.Array, array: jax.Array, pages: int, kv_heads: int) -> jax.Array:
    _, layers, page_size, columns = array.shape

    def copy_layer(layer: jax.Array, pool: jax.Array) -> jax.Array:
        parts = lax.dynamic_slice(array, (0, layer, 0, 0), (kv_heads, 1, page_size, columns))
        for head in range(kv_heads):
            start = (layer * pages + number, 0, head * columns)
            pool = lax.dynamic_update_slice(pool, parts[head], start)
        return pool

    return lax.fori_loop(0, layers, copy_layer, pool)
