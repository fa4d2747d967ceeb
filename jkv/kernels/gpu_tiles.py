"""What the GPU kernels share: the refs they read, a tile of keys and values out of the pool, and one step of
the running softmax. A tile's sides are powers of two, as Triton needs; what that makes too much is masked.

Refs are indexed by arrays of integers alone: Pallas interprets no load that mixes them with slices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from jkv.kernels.batch import StepBatch
from jkv.kernels.gpu_blocks import power_above
from jkv.kernels.kv_pool import KvArrays, from_stored

MASKED = -1e30


class Operands(NamedTuple):
    """What the kernels read: arrays outside of a kernel, refs to the whole of them inside."""

    q: Any  # [T, heads, head_dim]
    pool: KvArrays[Any]
    layer: Any  # [1]
    window: Any  # [1]
    page_table: Any  # [S, W]
    kv_lens: Any  # [S]
    q_starts: Any  # [S]
    q_lens: Any  # [S]
    counts: Any  # [2]

    @staticmethod
    def of(
        q: jax.Array,
        pool: KvArrays[jax.Array],
        layer: jax.Array,
        window: jax.Array,
        batch: StepBatch[jax.Array],
    ) -> Operands:
        lists = batch.page_table, batch.kv_lens, batch.q_starts, batch.q_lens, batch.counts
        return Operands(q, pool, layer.reshape(1), window.reshape(1), *lists)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What the kernels are specialized on beside tile sizes."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    pages: int
    page_size: int
    scale: float
    soft_cap: float | None

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return power_above(self.head_dim)


class KvTile(NamedTuple):
    """Keys and values of one head, `[keys, width]`, zero where none was read, and int8's scales `[keys]`."""

    keys: jax.Array
    values: jax.Array
    key_scales: jax.Array | None
    value_scales: jax.Array | None


class Running(NamedTuple):
    """Softmax so far, in powers of 2: `exp2` is one instruction, `exp` two. All float32."""

    peak: jax.Array  # [rows] running maximum of the logits' logarithms to base 2
    total: jax.Array  # [rows] running sum
    out: jax.Array  # [rows, width] unnormalized output

    @staticmethod
    def empty(rows: int, width: int) -> Running:
        return Running(
            jnp.full((rows,), MASKED, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            jnp.zeros((rows, width), jnp.float32),
        )


def ceil_div(a: jax.Array, b: jax.Array | int) -> jax.Array:
    """Of int32 that are not negative, where a floor division would also look at signs."""
    return lax.div(a + b - 1, jnp.int32(b))


def cells(problem: Problem, rows: jax.Array, used: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A tile's row and column indices, `[rows, 1]` and `[1, width]`, and which of its cells exist."""
    columns = jnp.arange(problem.width)[None, :]
    return rows[:, None], columns, used[:, None] & (columns < problem.head_dim)


def load_queries(
    ops: Operands, problem: Problem, tokens: jax.Array, heads: jax.Array, used: jax.Array
) -> jax.Array:
    """`[rows, width]` of q, zero where not `used`."""
    rows, columns, where = cells(problem, tokens, used)
    return plgpu.load(ops.q.at[rows, heads[:, None], columns], mask=where, other=0)


def load_tile(
    ops: Operands, problem: Problem, seq: jax.Array, head: jax.Array, keys: jax.Array, used: jax.Array
) -> KvTile:
    """Keys and values of a sequence at the positions `keys`, of which only those `used` are read."""
    page_size = jnp.int32(problem.page_size)
    numbers = plgpu.load(ops.page_table.at[seq, lax.div(keys, page_size)], mask=used, other=0)
    pool_rows, offsets = ops.layer[0] * problem.pages + numbers, lax.rem(keys, page_size)
    rows, columns, where = cells(problem, pool_rows, used)

    def values(half: int) -> jax.Array:
        first = (2 * head + half) * problem.head_dim
        ref = ops.pool.values.at[rows, offsets[:, None], first + columns]
        return from_stored(plgpu.load(ref, mask=where, other=0))

    def scales(half: int) -> jax.Array | None:
        if ops.pool.scales is None:
            return None
        first = (2 * head + half) * page_size
        return plgpu.load(ops.pool.scales.at[pool_rows, first + offsets], mask=used, other=0)

    return KvTile(values(0), values(1), scales(0), scales(1))


def accumulate(problem: Problem, run: Running, q: jax.Array, tile: KvTile, seen: jax.Array) -> Running:
    """One key block more: `q` is `[rows, width]`, `seen` says which keys a row sees, `[rows or 1, keys]`.

    A block of which a row sees nothing leaves the row's bits as they were, once it has seen a key.
    """
    logits = _log2(problem, _product(q, tile.keys, tile.key_scales))
    logits = jnp.where(seen, logits, MASKED)
    peak = jnp.maximum(run.peak, logits.max(axis=1))
    weights = jnp.exp2(logits - peak[:, None])
    decay = jnp.exp2(run.peak - peak)
    total = run.total * decay + weights.sum(axis=1)
    if tile.value_scales is not None:
        weights = weights * tile.value_scales[None, :]
    dtype = _product_dtype(q, tile.values)
    out = dot(weights.astype(dtype), tile.values.astype(dtype), contract=0)
    return Running(peak, total, run.out * decay[:, None] + out)


def merge(run: Running, other: Running) -> Running:
    """Softmax over the keys of two disjoint runs; of rows alike, or one row against its splits' rows."""
    peak = jnp.maximum(run.peak, other.peak.max(axis=0, keepdims=True))
    old, new = jnp.exp2(run.peak - peak), jnp.exp2(other.peak - peak)
    total = run.total * old + (other.total * new).sum(axis=0, keepdims=True)
    out = run.out * old[:, None] + (other.out * new[:, None]).sum(axis=0, keepdims=True)
    return Running(peak, total, out)


def _product(q: jax.Array, keys: jax.Array, scales: jax.Array | None) -> jax.Array:
    dtype = _product_dtype(q, keys)
    product = dot(q.astype(dtype), keys.astype(dtype), contract=1)
    return product if scales is None else product * scales[None, :]


def _log2(problem: Problem, product: jax.Array) -> jax.Array:
    """Logits times log2 e."""
    log2_e = math.log2(math.e)
    if problem.soft_cap is None:
        return product * (problem.scale * log2_e)
    capped = jnp.tanh(product * (problem.scale / problem.soft_cap))
    return capped * (problem.soft_cap * log2_e)


def _product_dtype(q: jax.Array, stored: jax.Array) -> jnp.dtype:
    """int8 is exact in all that q may be; its scales come later."""
    return q.dtype if stored.dtype == jnp.int8 else jnp.promote_types(q.dtype, stored.dtype)


def dot(a: jax.Array, b: jax.Array, *, contract: int) -> jax.Array:
    """The product of a tile's rows with the columns (`contract` 0) or rows (1) of another, in float32."""
    # By default Triton rounds the operands of float32 products to 10 bits.
    return lax.dot_general(
        a,
        b,
        (((1,), (contract,)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
