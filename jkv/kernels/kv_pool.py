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
    """`[layers * pages, page_size, 2 * kv_heads * head_dim]`; row `layer * pages + page`. A token's K and V
    lie interleaved by head: K of head 0, V of head 0, K of head 1 ...

    Heads have no axis of their own: XLA:TPU tiles the last two axes, and stores a pool that ends in heads of
    64, or in 6 rows of 128, in an order that every step would first copy, padded. `dtype` is the stored one
    (see `stored_dtype`).
    """

    layers: int
    pages: int
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: DTypeLike

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.layers * self.pages, self.page_size, 2 * self.kv_heads * self.head_dim)

    @property
    def page_shape(self) -> tuple[int, int, int, int]:
        """A page on its own, see jkv.kernels.page_transfer."""
        return (self.kv_heads, self.layers, self.page_size, 2 * self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, K and V."""
        per_token = self.layers * 2 * self.kv_heads * self.head_dim
        return per_token * self.page_size * jnp.dtype(self.dtype).itemsize


def stored_dtype(kv_dtype: DTypeLike, platform: str) -> jnp.dtype:
    """The pool's dtype. On CPU bfloat16 is stored as its bits: XLA:CPU does bfloat16 gathers and scatters in
    float32, and would convert the whole pool before and after each.
    """
    dtype = jnp.dtype(kv_dtype)
    return jnp.dtype(jnp.uint16) if platform == "cpu" and dtype == jnp.bfloat16 else dtype


def to_stored(rows: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Keys or values as a pool of `dtype` stores them."""
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)
    return rows.astype(dtype)


def from_stored(rows: jax.Array) -> jax.Array:
    """The floating-point keys and values of a pool's rows."""
    return lax.bitcast_convert_type(rows, jnp.bfloat16) if rows.dtype == jnp.uint16 else rows


def write_kv(
    pool: jax.Array,
    layer: jax.Array,
    pages: int,
    keys: jax.Array,
    values: jax.Array,
    batch: StepBatch[jax.Array],
) -> jax.Array:
    """Writes keys and values `[T, kv_heads, head_dim]` of one layer; masked tokens (see StepBatch) write
    nothing.
    """
    tokens = keys.shape[0]
    rows = to_stored(jnp.stack([keys, values], axis=2).reshape(tokens, pool.shape[2]), pool.dtype)
    kept = batch.write_pages < pages
    pool_rows = layer * pages + batch.write_pages
    if tokens == 1:
        # XLA turns a scatter of one row into a copy of the whole pool; a slice update stays in place.
        start = (jnp.where(kept, pool_rows, 0)[0], batch.write_offsets[0], 0)
        old = lax.dynamic_slice(pool, start, (1, 1, rows.shape[1]))
        return lax.dynamic_update_slice(pool, jnp.where(kept[0], rows[None], old), start)
    return pool.at[jnp.where(kept, pool_rows, pool.shape[0]), batch.write_offsets].set(rows, mode="drop")
