"""The running softmax of the TPU kernel (arXiv:1805.02867), over blocks of keys in vector memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jkv.kernels.kv_pool import KvArrays
from jkv.kernels.tpu_blocks import BlockSize
from jkv.kernels.tpu_lanes import Heads, Span

# A key that a query does not see weighs exp(_MASKED - peak): 0 from the first block on, for a peak starts at
# _START.
_MASKED, _START = -2e30, -1e30

# Pallas's references into memory, `jax.Array`-like; it has no type for them.
Ref = Any


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a kernel is specialized on beside its arrays' shapes; `dtype` is the products' operands'."""

    heads: Heads
    page_size: int
    block: BlockSize
    scale: float
    soft_cap: float | None
    dtype: DTypeLike

    @property
    def rows(self) -> int:
        """Rows of a block of queries, of one KV head."""
        return self.heads.group * self.block.queries

    @property
    def copied_pages(self) -> int:
        return self.block.copied // self.page_size


class Running(NamedTuple):
    """What of the softmax is known, for every KV head and row of a block of queries."""

    peak: Ref  # [kv_heads, rows, 1] maximum
    total: Ref  # [kv_heads, rows, 1] sum of exponentials
    out: Ref  # [kv_heads, rows, value_lanes] unnormalized output


def start(running: Running) -> None:
    """Before the first key."""
    running.peak[...] = jnp.full(running.peak.shape, _START, jnp.float32)
    running.total[...] = jnp.zeros(running.total.shape, jnp.float32)
    running.out[...] = jnp.zeros(running.out.shape, jnp.float32)


def result(running: Running) -> jax.Array:
    """The output after the last key, `[kv_heads, rows, value_lanes]`; 0 for a row that has seen none."""
    total = running.total[...]
    return running.out[...] / jnp.where(total > 0, total, 1)


def clear(kv: KvArrays[Ref], first: jax.Array, last: jax.Array) -> None:
    """Zeroes all but the keys `first` to `last` of pages as `accumulate` takes them: others may be anything,
    and 0 times NaN is NaN.
    """

    def keep(ref: Ref, key: jax.Array) -> None:
        ref[...] = jnp.where((key >= first) & (key <= last), ref[...], jnp.zeros(ref.shape, ref.dtype))

    def iota(ref: Ref, axis: int) -> jax.Array:
        return lax.broadcasted_iota(jnp.int32, ref.shape, axis)

    size = kv.values.shape[1]
    keep(kv.values, iota(kv.values, 0) * size + iota(kv.values, 1))
    if kv.scales is not None:
        keep(kv.scales, iota(kv.scales, 0) * size + lax.rem(iota(kv.scales, 2), size))


def accumulate(
    problem: Problem, running: Running, q: Ref, kv: KvArrays[Ref], seen: jax.Array, head: int
) -> None:
    """Adds a block of keys to one KV head's rows.

    Args:
        q: `[1, kv_heads, rows, key_lanes]`.
        kv: pages `[pages, page_size, width]`; int8's scales are `[pages, 1, 2 * kv_heads * page_size]`.
        seen: `[rows, keys]`.
    """
    k_span, v_span = problem.heads.key_span(head), problem.heads.value_span(head)
    k = _load(problem, kv, k_span)
    v = k if k_span == v_span else _load(problem, kv, v_span)
    scores = _product(problem, q[0, head, :, : k_span.size], k, over=1) * problem.scale
    if kv.scales is not None:
        scores *= _scales(problem, kv.scales, 2 * head)
    if problem.soft_cap is not None:
        scores = problem.soft_cap * jnp.tanh(scores / problem.soft_cap)
    scores = jnp.where(seen, scores, _MASKED)
    before = running.peak[head]
    peak = jnp.maximum(before, scores.max(axis=1, keepdims=True))
    weights, decay = jnp.exp(scores - peak), jnp.exp(before - peak)
    running.peak[head] = peak
    running.total[head] = running.total[head] * decay + weights.sum(axis=1, keepdims=True)
    if kv.scales is not None:
        weights *= _scales(problem, kv.scales, 2 * head + 1)
    rows = (head, slice(None), slice(0, v_span.size))
    running.out[rows] = running.out[rows] * decay + _product(problem, weights.astype(v.dtype), v, over=0)


def _load(problem: Problem, kv: KvArrays[Ref], span: Span) -> jax.Array:
    rows = kv.values[:, :, span.start : span.stop].astype(problem.dtype)
    return rows.reshape(problem.block.keys, span.size)


def _scales(problem: Problem, scales: Ref, part: int) -> jax.Array:
    """The scales of one head's K or V, `[1, keys]`."""
    size = problem.page_size
    pages = [scales[i, :, part * size : (part + 1) * size] for i in range(scales.shape[0])]
    return jnp.concatenate(pages, axis=1)


def _product(problem: Problem, left: jax.Array, right: jax.Array, over: int) -> jax.Array:
    """`left`, over its last axis, times `right`, over the axis `over`, in float32."""
    return lax.dot_general(
        left,
        right,
        (((1,), (over,)), ((), ())),
        # By default the MXU rounds operands to bfloat16.
        precision=lax.Precision.HIGHEST if problem.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
