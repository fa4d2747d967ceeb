"""Ragged paged attention for TPUs, in Pallas (Mosaic): one batch of prefill chunks and decodes.

FlashAttention (arXiv:2205.14135) over pages (arXiv:2309.06180). The grid walks blocks of the batch's flat
query rows, in order; loops inside walk a block's sequences and their blocks of keys. While a block of keys is
attended to, the pages of the next one are copied from HBM, be it of another sequence or block of queries.

Blocks of keys start at multiples of their size, and leave the rows of other sequences bit for bit as they
were: a query's reduction order depends on its position alone.

Decodes are not split over their keys (flash-decoding): a TPU core runs one program, and its copies keep the
memory as busy with one sequence as with many. Where two cores make a device (v4, v5p), one of them is idle:
a step of the grid begins with what the one before it has started to copy.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jkv.kernels.batch import StepBatch
from jkv.kernels.kv_pool import KvArrays
from jkv.kernels.tpu_blocks import BlockSize, TpuBlocks, product_dtype
from jkv.kernels.tpu_kernel import Kernel, Scalars, Scratch, scratch_shapes
from jkv.kernels.tpu_lanes import Heads, from_query_blocks, to_query_blocks
from jkv.kernels.tpu_softmax import Problem, Ref


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
    blocks: TpuBlocks,
    interpret: Any,
) -> jax.Array:
    """Causal attention of every query over its sequence's pages; see `jkv.kernels.attention.attend`.

    Products take bfloat16 where q is bfloat16 and the pool bfloat16 or int8, else float32; sums are float32.

    Args:
        interpret: runs the kernel as XLA programs, on any device; or `pltpu.InterpretParams`.
    """
    tokens, seqs = q.shape[0], batch.kv_lens.shape[0]
    decodes, every = batch.counts[0], batch.counts[1]

    def attend(q: jax.Array, block: BlockSize, first: jax.Array | int, end: jax.Array) -> jax.Array:
        scalars = Scalars(
            call=jnp.stack([layer * pages, window, jnp.int32(first), end]),
            kv_lens=batch.kv_lens,
            q_starts=batch.q_starts,
            q_lens=batch.q_lens,
        )
        return _attend(
            q, pool, batch.page_table, scalars, block, scale, soft_cap, blocks.vmem_limit, interpret
        )

    if tokens <= blocks.decode.queries:
        return attend(q, blocks.decode, 0, every)
    most = min(tokens, seqs)
    first = jnp.pad(attend(q[:most], blocks.decode, 0, decodes), ((0, tokens - most), (0, 0), (0, 0)))
    rest = attend(q, blocks.prefill.for_tokens(tokens), decodes, every)
    return jnp.where(jnp.arange(tokens)[:, None, None] < decodes, first, rest)


def _attend(
    q: jax.Array,
    pool: KvArrays[jax.Array],
    page_table: jax.Array,
    scalars: Scalars,
    block: BlockSize,
    scale: float,
    soft_cap: float | None,
    vmem_limit: int,
    interpret: Any,
) -> jax.Array:
    """Rows of the sequences that `scalars` picks; other rows are unspecified but finite."""
    tokens, num_heads, head_dim = q.shape
    _, page_size, width = pool.values.shape
    kv_heads = width // (2 * head_dim)
    problem = Problem(
        heads=Heads(kv_heads=kv_heads, group=num_heads // kv_heads, head_dim=head_dim),
        page_size=page_size,
        block=block,
        scale=scale,
        soft_cap=soft_cap,
        dtype=product_dtype(q.dtype, pool.values.dtype),
    )
    blocks = to_query_blocks(q.astype(problem.dtype), problem.heads, block.queries)
    out_shape = (*blocks.shape[:-1], problem.heads.value_lanes)

    def body(*refs: Ref) -> None:
        call, kv_lens, q_starts, q_lens, q, tables, kv, out, *rest = refs
        scratch = Scratch(*rest)
        Kernel(
            problem=problem,
            scalars=Scalars(call, kv_lens, q_starts, q_lens),
            q=q,
            tables=tables,
            pool=kv,
            out=out,
            scratch=scratch,
        ).run()

    def of_block(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape[1:]), lambda i, *_: (i, 0, 0, 0))

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(blocks.shape[0],),
            in_specs=[of_block(blocks.shape), in_hbm, jax.tree.map(lambda _: in_hbm, pool)],
            out_specs=of_block(out_shape),
            scratch_shapes=scratch_shapes(problem, pool, page_table.shape[1]),
        ),
        out_shape=jax.ShapeDtypeStruct(out_shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_limit),
        interpret=interpret,
        name="paged_attention",
    )(*scalars, blocks, page_table, pool)
    return from_query_blocks(out, problem.heads, block.queries)[:tokens]
