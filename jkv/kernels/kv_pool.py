"""The flat L1 pool: its shape, and writing a step's keys and values into it in place."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jkv.kernels.batch import StepBatch


@dataclass(frozen=True, kw_only=True)
class PoolShape:
    """`[layers * pages, page_size, 2 * kv_heads, head_dim]`; row `layer * pages + page`, K and V interleaved
    by head.
    """

    layers: int
    pages: int
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: DTypeLike

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.layers * self.pages, self.page_size, 2 * self.kv_heads, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, K and V."""
        per_token = self.layers * 2 * self.kv_heads * self.head_dim
        return per_token * self.page_size * jnp.dtype(self.dtype).itemsize


def write_kv(
    pool: jax.Array, layer: jax.Array, pages: int, keys: jax.Array, values: jax.Array, batch: StepBatch
) -> jax.Array:
    """Writes keys and values `[T, kv_heads, head_dim]` of one layer; masked tokens (see StepBatch) write
    nothing.
    """
    tokens, kv_heads, head_dim = keys.shape
    rows = jnp.stack([keys, values], axis=2).reshape(tokens, 2 * kv_heads, head_dim).astype(pool.dtype)
    kept = batch.write_pages < pages
    pool_rows = layer * pages + batch.write_pages
    if tokens == 1:
        # XLA turns a scatter of one row into a copy of the whole pool; a slice update stays in place.
        start = (jnp.where(kept, pool_rows, 0)[0], batch.write_offsets[0], 0, 0)
        old = lax.dynamic_slice(pool, start, (1, 1, *rows.shape[1:]))
        return lax.dynamic_update_slice(pool, jnp.where(kept[0], rows[None], old), start)
    return pool.at[jnp.where(kept, pool_rows, pool.shape[0]), batch.write_offsets].set(rows, mode="drop")
