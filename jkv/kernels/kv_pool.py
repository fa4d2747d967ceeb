"""The flat L1 pool: its shape, its dtypes, and writing a step's keys and values into it in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jkv.kernels.batch import ArrayT, StepBatch

# The largest of the values that int8 takes on both sides of 0.
_INT8_MAX = 127


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KvArrays(Generic[ArrayT]):
    """Keys and values: all of the pool, or one page on its own. `scales` are float32, None unless the values
    are int8; a value is its int8 times its scale.
    """

    values: ArrayT
    scales: ArrayT | None

    @property
    def nbytes(self) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))


@dataclass(frozen=True, kw_only=True)
class PoolShape:
    """Values `[layers * pages, page_size, 2 * kv_heads * head_dim]`; row `layer * pages + page`. A token's K
    and V lie interleaved by head: K of head 0, V of head 0, K of head 1 ...

    Scales `[layers * pages, 2 * kv_heads * page_size]`, one for each token and head, K and V: K's of head 0
    for all tokens of the page, V's of head 0 ...

    Heads have no axis of their own: XLA:TPU tiles the last two axes, and stores a pool that ends in heads of
    64, or in 6 rows of 128, in an order that every step would first copy, padded. `dtype` is the stored one
    (see `stored_dtype`).

    `tp` devices share the pool, each with `device_heads` of its heads. Where they are more than the KV heads,
    the pool holds each of these `copies` times, next to each other; pages on their own hold each once,
    whatever `tp`.
    """

    layers: int
    pages: int
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: DTypeLike
    tp: int = 1

    @property
    def copies(self) -> int:
        """Devices that hold the same KV head."""
        return max(1, self.tp // self.kv_heads)

    @property
    def device_heads(self) -> int:
        """KV heads in one device's part of the pool."""
        return self.kv_heads * self.copies // self.tp

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the values."""
        width = 2 * self.kv_heads * self.copies * self.head_dim
        return (self.layers * self.pages, self.page_size, width)

    @property
    def page_shape(self) -> tuple[int, int, int, int]:
        """Of the values of a page on its own, see jkv.kernels.page_transfer."""
        return (self.kv_heads, self.layers, self.page_size, 2 * self.head_dim)

    @property
    def split_page_shape(self) -> tuple[int, int, int, int]:
        """`page_shape` as arrays have it that lie over the devices: the first axis is theirs. Copies of a
        head share its layers, the last one's padded where they do not divide.
        """
        return (self.kv_heads * self.copies, -(-self.layers // self.copies), *self.page_shape[2:])

    @property
    def quantized(self) -> bool:
        return jnp.dtype(self.dtype) == jnp.int8

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers: K, V and their scales."""
        return self._abstract_page(self.page_shape).nbytes

    @property
    def device_page_bytes(self) -> int:
        """Bytes that one page takes in each device's part of the pool."""
        return self.page_bytes // self.kv_heads * self.device_heads

    @property
    def device_page_values(self) -> int:
        """Elements of one page in each device's part of the pool's values."""
        return self.layers * self.page_size * 2 * self.device_heads * self.head_dim

    @property
    def host_page_bytes(self) -> int:
        """Bytes of a page that lies over the devices, in host memory."""
        return self.abstract_page().nbytes

    def abstract_pool(self) -> KvArrays[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the pool."""
        rows, page_size, width = self.shape
        return self._abstract(self.shape, (rows, width // self.head_dim * page_size))

    def abstract_page(self) -> KvArrays[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of a page on its own, as arrays have it."""
        return self._abstract_page(self.split_page_shape)

    def _abstract_page(self, values: tuple[int, ...]) -> KvArrays[jax.ShapeDtypeStruct]:
        return self._abstract(values, (*values[:2], 2 * self.page_size))

    def _abstract(self, values: tuple[int, ...], scales: tuple[int, ...]) -> KvArrays[jax.ShapeDtypeStruct]:
        return KvArrays(
            values=jax.ShapeDtypeStruct(values, self.dtype),
            scales=jax.ShapeDtypeStruct(scales, jnp.float32) if self.quantized else None,
        )


def stored_dtype(kv_dtype: DTypeLike, platform: str) -> jnp.dtype:
    """The pool's dtype. On CPU bfloat16 is stored as its bits: XLA:CPU does bfloat16 gathers and scatters in
    float32, and would convert the whole pool before and after each.
    """
    dtype = jnp.dtype(kv_dtype)
    return jnp.dtype(jnp.uint16) if platform == "cpu" and dtype == jnp.bfloat16 else dtype


def to_stored(rows: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Keys or values as a pool of `dtype`, not int8, stores them."""
    if dtype == jnp.uint16:
        return lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)
    return rows.astype(dtype)


def from_stored(rows: jax.Array) -> jax.Array:
    """The floating-point keys and values of a pool's rows."""
    return lax.bitcast_convert_type(rows, jnp.bfloat16) if rows.dtype == jnp.uint16 else rows


def quantize(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 of the shape of `rows`, `[..., head_dim]`, and their scales `[...]`: a head's largest magnitude
    becomes 127.
    """
    wide = rows.astype(jnp.float32)
    scales = jnp.abs(wide).max(axis=-1) / _INT8_MAX
    steps = wide / jnp.where(scales > 0, scales, 1)[..., None]
    return jnp.clip(jnp.round(steps), -_INT8_MAX, _INT8_MAX).astype(jnp.int8), scales


def load_kv(pool: KvArrays[jax.Array], rows: jax.Array) -> jax.Array:
    """Keys and values of whole pool rows, int32 `[N]`, in floating point: `[N * page_size, 2 * kv_heads *
    head_dim]`.
    """
    _, page_size, width = pool.values.shape
    values = from_stored(pool.values[rows].reshape(-1, width))
    if pool.scales is None:
        return values
    heads = pool.scales.shape[1] // page_size
    scales = pool.scales[rows].reshape(-1, heads, page_size).transpose(0, 2, 1).reshape(-1, heads, 1)
    return (values.reshape(-1, heads, width // heads).astype(jnp.float32) * scales).reshape(-1, width)


def write_kv(
    pool: KvArrays[jax.Array],
    layer: jax.Array,
    pages: int,
    keys: jax.Array,
    values: jax.Array,
    batch: StepBatch[jax.Array],
) -> KvArrays[jax.Array]:
    """Writes keys and values `[T, kv_heads, head_dim]` of one layer; masked tokens (see StepBatch) write
    nothing.
    """
    rows = jnp.stack([keys, values], axis=2)
    kept = batch.write_pages < pages
    pool_rows = layer * pages + batch.write_pages
    if pool.scales is None:
        return KvArrays(values=_write(pool.values, pool_rows, kept, rows, batch.write_offsets), scales=None)
    tokens, width = rows.shape[0], pool.values.shape[2]
    new_values, new_scales = quantize(rows.reshape(tokens, 2 * keys.shape[1], -1))
    return lax.platform_dependent(
        pool.values,
        pool.scales,
        pool_rows,
        kept,
        new_values.reshape(tokens, width),
        new_scales,
        batch.write_offsets,
        cuda=scatter_quantized,
        tpu=write_quantized_runs,
        default=_write_quantized,
    )


def _write(
    pool: jax.Array, pool_rows: jax.Array, kept: jax.Array, kv: jax.Array, offsets: jax.Array
) -> jax.Array:
    tokens = kv.shape[0]
    rows = to_stored(kv.reshape(tokens, pool.shape[2]), pool.dtype)
    if tokens == 1:
        # XLA turns a scatter of one row into a copy of the whole pool; a slice update stays in place.
        start = (jnp.where(kept, pool_rows, 0)[0], offsets[0], 0)
        old = lax.dynamic_slice(pool, start, (1, 1, rows.shape[1]))
        return lax.dynamic_update_slice(pool, jnp.where(kept[0], rows[None], old), start)
    return pool.at[jnp.where(kept, pool_rows, pool.shape[0]), offsets].set(rows, mode="drop")


def _write_quantized(
    values: jax.Array,
    scales: jax.Array,
    pool_rows: jax.Array,
    kept: jax.Array,
    new_values: jax.Array,
    new_scales: jax.Array,
    offsets: jax.Array,
) -> KvArrays[jax.Array]:
    """Writes int8 `[T, width]` and their scales `[T, heads]` token by token, in place."""
    tokens, heads = new_scales.shape
    _, page_size, width = values.shape
    (tokens_kept,) = jnp.nonzero(kept, size=tokens)

    def write(i: jax.Array, pool: KvArrays[jax.Array]) -> KvArrays[jax.Array]:
        assert pool.scales is not None
        token = tokens_kept[i]
        row, offset = pool_rows[token], offsets[token]
        page = lax.dynamic_slice(pool.scales, (row, 0), (1, heads * page_size)).reshape(heads, page_size)
        page = jnp.where(jnp.arange(page_size) == offset, new_scales[token][:, None], page)
        return KvArrays(
            values=lax.dynamic_update_slice(
                pool.values, new_values[token].reshape(1, 1, width), (row, offset, 0)
            ),
            scales=lax.dynamic_update_slice(pool.scales, page.reshape(1, -1), (row, 0)),
        )

    return lax.fori_loop(0, kept.sum(), write, KvArrays(values=values, scales=scales))


def scatter_quantized(
    values: jax.Array,
    scales: jax.Array,
    pool_rows: jax.Array,
    kept: jax.Array,
    new_values: jax.Array,
    new_scales: jax.Array,
    offsets: jax.Array,
) -> KvArrays[jax.Array]:
    """As `_write_quantized`, all tokens at once: on GPUs kernels too small cost more than what they move."""
    page_size, heads = values.shape[1], new_scales.shape[1]
    rows = jnp.where(kept, pool_rows, values.shape[0])
    columns = jnp.arange(heads) * page_size + offsets[:, None]
    return KvArrays(
        values=values.at[rows, offsets].set(new_values, mode="drop"),
        scales=scales.at[rows[:, None], columns].set(new_scales, mode="drop"),
    )


def write_quantized_runs(
    values: jax.Array,
    scales: jax.Array,
    pool_rows: jax.Array,
    kept: jax.Array,
    new_values: jax.Array,
    new_scales: jax.Array,
    offsets: jax.Array,
) -> KvArrays[jax.Array]:
    """As `_write_quantized`, page by page: tokens that follow each other in one are merged into a copy of it.
    XLA:TPU copies a whole pool of int8 for a scatter into it, and a loop's turn costs it more than to move a
    page.
    """
    tokens, heads = new_scales.shape
    _, page_size, width = values.shape
    # Whatever a run's offset, a page's worth of tokens can be sliced so that the run lies where it is to go.
    around = ((page_size, page_size), (0, 0))
    new_values = jnp.pad(new_values, around)
    new_scales = jnp.pad(new_scales, around)
    joins = (pool_rows[1:] == pool_rows[:-1]) & (offsets[1:] == offsets[:-1] + 1) & kept[1:] & kept[:-1]
    (firsts,) = jnp.nonzero(kept.at[1:].set(kept[1:] & ~joins), size=tokens)
    (lasts,) = jnp.nonzero(kept.at[:-1].set(kept[:-1] & ~joins), size=tokens)

    def write(i: jax.Array, pool: KvArrays[jax.Array]) -> KvArrays[jax.Array]:
        assert pool.scales is not None
        row, offset = pool_rows[firsts[i]], offsets[firsts[i]]
        start, place = firsts[i] - offset + page_size, jnp.arange(page_size)
        new = (place >= offset) & (place <= offset + lasts[i] - firsts[i])
        page = lax.dynamic_slice(pool.values, (row, 0, 0), (1, page_size, width))
        rows = lax.dynamic_slice(new_values, (start, 0), (page_size, width))
        page_scales = lax.dynamic_slice(pool.scales, (row, 0), (1, heads * page_size))
        scale_rows = lax.dynamic_slice(new_scales, (start, 0), (page_size, heads)).T.reshape(1, -1)
        return KvArrays(
            values=lax.dynamic_update_slice(
                pool.values, jnp.where(new[None, :, None], rows[None], page), (row, 0, 0)
            ),
            scales=lax.dynamic_update_slice(
                pool.scales, jnp.where(jnp.tile(new, heads)[None], scale_rows, page_scales), (row, 0)
            ),
        )

    runs = kept.sum() - joins.sum()
    return lax.fori_loop(0, runs, write, KvArrays(values=values, scales=scales))
