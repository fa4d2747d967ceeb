"""Paged attention for GPUs, by Pallas's Triton lowering: one kernel for chunks of queries, one for the splits
of single queries and one that merges these. Same semantics as `jkv.kernels.xla_attention`.

They write each row in place of its query, which nobody else reads.
"""

from __future__ import annotations

import jax

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.kernels.batch import StepBatch
from jkv.kernels.gpu_blocks import UNADDRESSABLE, GpuBlocks
from jkv.kernels.gpu_decode import decode
from jkv.kernels.gpu_prefill import prefill
from jkv.kernels.gpu_tiles import Operands, Problem
from jkv.kernels.kv_pool import KvArrays

_MOST_HEAD_DIM, _MOST_GROUP = 256, 128


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
    blocks: GpuBlocks,
    interpret: bool,
) -> jax.Array:
    """Causal attention of every query over its sequence's pages; see `jkv.kernels.attention.attend`. Rows of
    padding keep what q has there.

    Args:
        interpret: runs the kernels as XLA programs, on any device.

    Raises:
        UnsupportedModelError: heads that no tile holds.
        ConfigError: a pool whose rows Triton could not address.
    """
    _, heads, head_dim = q.shape
    _, page_size, width = pool.values.shape
    problem = Problem(
        tokens=q.shape[0],
        heads=heads,
        kv_heads=width // (2 * head_dim),
        head_dim=head_dim,
        pages=pages,
        page_size=page_size,
        scale=scale,
        soft_cap=soft_cap,
    )
    _check(problem, pool.values)
    ops = Operands.of(q, pool, layer, window, batch)
    if not blocks.one_path:
        ops = ops._replace(q=decode(ops, problem, blocks, interpret=interpret))
    return prefill(ops, problem, blocks.prefill, decodes_too=blocks.one_path, interpret=interpret)


def _check(problem: Problem, values: jax.Array) -> None:
    if problem.head_dim > _MOST_HEAD_DIM:
        raise UnsupportedModelError(
            f"head_dim {problem.head_dim}: attention on GPUs takes heads of up to {_MOST_HEAD_DIM}"
        )
    if problem.group > _MOST_GROUP:
        raise UnsupportedModelError(
            f"{problem.group} query heads of one KV head: attention on GPUs takes up to {_MOST_GROUP}"
        )
    if values.dtype.itemsize == 1 and values.size in UNADDRESSABLE:
        raise ConfigError(
            f"--l1-gib: {values.size} bytes of int8 keys and values on one GPU cannot be addressed; "
            "allowed: up to 2 GiB, or more than 4 GiB"
        )
