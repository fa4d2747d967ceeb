"""Paged attention on CPUs, by the kernel in cpu/attention.cc."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jkv.kernels.batch import StepBatch
from jkv.kernels.kv_pool import KvArrays

# Of heads: the least that fills a vector of every processor.
DIM_MULTIPLE = 16


def paged_attention(
    q: jax.Array,
    pool: KvArrays[jax.Array],
    layer: jax.Array,
    pages: int,
    batch: StepBatch[jax.Array],
    *,
    window: jax.Array,
    scale: float,
    soft_cap: float | None,
) -> jax.Array:
    """As `jkv.kernels.xla_attention.paged_attention`, for a head_dim that DIM_MULTIPLE divides. A query's
    bits depend on its keys, its chunk's first position and whether it is a decode.
    """
    assert q.shape[2] % DIM_MULTIPLE == 0
    scales = jnp.zeros((1,), jnp.float32) if pool.scales is None else pool.scales
    call = jax.ffi.ffi_call("jkv_attention", jax.ShapeDtypeStruct(q.shape, jnp.float32))
    out = call(
        q.astype(jnp.float32),
        pool.values,
        scales,
        layer,
        window,
        batch.page_table,
        batch.kv_lens,
        batch.q_starts,
        batch.q_lens,
        batch.counts,
        pages=np.int64(pages),
        scale=np.float32(scale),
        soft_cap=np.float32(0 if soft_cap is None else soft_cap),
    )
    return out.astype(q.dtype)
