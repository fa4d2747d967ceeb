"""One layer's attention, by the kernel that a platform has, over keys and values that it first writes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax

from jkv.kernels import cpu_attention, gpu_attention, tpu_attention, xla_attention
from jkv.kernels.batch import StepBatch
from jkv.kernels.gpu_blocks import GpuBlocks
from jkv.kernels.kv_pool import KvArrays, write_kv
from jkv.kernels.mesh import BY_HEAD, WHOLE, DeviceMesh, pool_partition
from jkv.kernels.tpu_blocks import TpuBlocks
from jkv.kernels.xla_attention import AttentionBlocks

Kernel = Literal["xla", "cpu", "mosaic", "triton"]


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What a compiled step's attention is specialized on beside its arrays' shapes. Over a `mesh` every
    device attends with the heads that it has (see jkv.kernels.mesh). With `interpret` a Pallas kernel runs as
    an XLA program, on any device. The kernel of CPUs has blocks of its own.
    """

    kernel: Kernel
    blocks: AttentionBlocks | TpuBlocks | GpuBlocks | None
    interpret: bool = False
    mesh: DeviceMesh | None = None


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

    def local(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pool: KvArrays[jax.Array],
        layer: jax.Array,
        batch: StepBatch[jax.Array],
        window: jax.Array,
    ) -> tuple[jax.Array, KvArrays[jax.Array]]:
        pool = write_kv(pool, layer, pages, k, v, batch)
        return read(
            q, pool, layer, pages, batch, window=window, scale=scale, soft_cap=soft_cap, spec=spec
        ), pool

    if spec.mesh is None:
        return local(q, k, v, pool, layer, batch, window)
    split = pool_partition(pool)
    over_heads = jax.shard_map(
        local,
        mesh=spec.mesh,
        in_specs=(BY_HEAD, BY_HEAD, BY_HEAD, split, WHOLE, WHOLE, WHOLE),
        out_specs=(BY_HEAD, split),
        check_vma=False,
    )
    return over_heads(q, k, v, pool, layer, batch, window)


def read(
    q: jax.Array,
    pool: KvArrays[jax.Array],
    layer: jax.Array,
    pages: int,
    batch: StepBatch[jax.Array],
    *,
    window: jax.Array,
    scale: float,
    soft_cap: float | None,
    spec: AttentionSpec,
) -> jax.Array:
    """The attention itself, of the heads that one device has; see `attend`."""
    if isinstance(spec.blocks, TpuBlocks):
        run = partial(tpu_attention.paged_attention, blocks=spec.blocks, interpret=spec.interpret)
    elif isinstance(spec.blocks, GpuBlocks):
        run = partial(gpu_attention.paged_attention, blocks=spec.blocks, interpret=spec.interpret)
    elif spec.blocks is None:
        run = cpu_attention.paged_attention
    else:
        run = partial(xla_attention.paged_attention, blocks=spec.blocks)
    return run(q, pool, layer, pages, batch, window=window, scale=scale, soft_cap=soft_cap)
