"""One layer's attention, by the kernel that a platform has, over keys and values that it first writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax

from jkv.kernels import xla_attention
from jkv.kernels.batch import StepBatch
from jkv.kernels.kv_pool import KvArrays, write_kv
from jkv.kernels.xla_attention import AttentionBlocks

Kernel = Literal["xla"]


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What a compiled step's attention is specialized on beside its arrays' shapes."""

    kernel: Kernel
    blocks: AttentionBlocks


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: KvArrays[jax.Array],
    layer: jax.Array,
    pages: int,
    batch: StepBatch[jax.Array],
    *,
    window: jax.Array,
    scale: float,
    soft_cap: float | None,
    spec: AttentionSpec,
) -> tuple[jax.Array, KvArrays[jax.Array]]:
    """Writes a layer's keys and values into the pool and attends to all that its sequences have there.

    Args:
        q: `[T, heads, head_dim]`.
        k, v: `[T, kv_heads, head_dim]`.
        pool: the flat KV pool of all layers.
        layer: int32 scalar, picks the pool rows `layer * pages ...`.
        window: int32 scalar; a query sees itself and the `window - 1` keys before it.
        scale: logits are `scale * q . k`;
        soft_cap: where given, a logit x becomes `soft_cap * tanh(x / soft_cap)` (Gemma 2, arXiv:2408.00118).

    Returns:
        `[T, heads, head_dim]` in q's dtype, rows of padding unspecified but finite; and the pool.
    """
    pool = write_kv(pool, layer, pages, k, v, batch)
    out = xla_attention.paged_attention(
        q,
        pool,
        layer,
        pages,
        batch,
        window=window,
        scale=scale,
        soft_cap=soft_cap,
        blocks=spec.blocks,
    )
    return out, pool
