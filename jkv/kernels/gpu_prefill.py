"""Chunks of queries on a GPU: a block of queries against the pages it may see (FlashAttention-2,
arXiv:2307.08691), the query heads of one KV head folded into rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jkv.kernels.gpu_blocks import Tiles, power_above
from jkv.kernels.gpu_tiles import (
    Operands,
    Problem,
    Running,
    accumulate,
    ceil_div,
    cells,
    load_queries,
    load_tile,
)


def prefill(
    ops: Operands, problem: Problem, tiles: Tiles, *, decodes_too: bool, interpret: bool
) -> jax.Array:
    """`ops.q` with the rows of the chunks, and of the decodes if `decodes_too`, in place of their queries."""
    kernel = partial(_kernel, problem=problem, tiles=tiles, decodes_too=decodes_too)
    queries = tiles.queries(problem.group)
    seqs = ops.kv_lens.shape[0]
    # Every sequence may end in a block that is not full.
    blocks = min(problem.tokens, problem.tokens // queries + seqs)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(ops.q.shape, ops.q.dtype),
        grid=(blocks, problem.kv_heads),
        input_output_aliases={0: 0},
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        name="paged_prefill",
    )(ops)


def _kernel(ops: Operands, out: Any, *, problem: Problem, tiles: Tiles, decodes_too: bool) -> None:
    queries = tiles.queries(problem.group)
    index = jnp.arange(power_above(ops.kv_lens.shape[0]))
    first_seq = 0 if decodes_too else ops.counts[0]
    mine = (index >= first_seq) & (index < ops.counts[1])
    q_lens = plgpu.load(ops.q_lens.at[index], mask=mine, other=0)
    blocks = ceil_div(q_lens, queries)
    # Later blocks see more keys: they go first.
    block, head = jnp.sum(blocks) - 1 - pl.program_id(0), pl.program_id(1)

    @pl.when(block >= 0)
    def _run() -> None:
        passed = jnp.cumsum(blocks) <= block
        seq = jnp.sum(passed.astype(jnp.int32))
        start = (block - jnp.sum(jnp.where(passed, blocks, 0))) * queries
        _query_block(ops, out, problem, tiles, seq, head, start)


def _query_block(
    ops: Operands,
    out: Any,
    problem: Problem,
    tiles: Tiles,
    seq: jax.Array,
    head: jax.Array,
    start: jax.Array,
) -> None:
    """The queries `start ...` of a chunk, of one KV head."""
    queries, group = tiles.queries(problem.group), problem.group
    kv_len, q_len = ops.kv_lens[seq], ops.q_lens[seq]
    row = jnp.arange(tiles.rows)
    query = start + lax.div(row, jnp.int32(group))
    used = (row < queries * group) & (query < q_len)
    # Where masked, past the end: Pallas's interpreter drops such writes.
    tokens = jnp.where(used, ops.q_starts[seq] + query, problem.tokens)
    heads = head * group + lax.rem(row, jnp.int32(group))
    q = load_queries(ops, problem, tokens, heads, used)
    positions = kv_len - q_len + query

    first = kv_len - q_len + start
    end = jnp.minimum(first + queries, kv_len)
    oldest = jnp.maximum(first - ops.window[0] + 1, 0)

    def body(block: jax.Array, run: Running) -> Running:
        keys = block * tiles.keys + jnp.arange(tiles.keys)
        tile = load_tile(ops, problem, seq, head, keys, (keys >= oldest) & (keys < end))
        distance = positions[:, None] - keys[None, :]
        seen = (distance >= 0) & (distance < ops.window[0])
        return accumulate(problem, run, q, tile, seen)

    run = Running.empty(tiles.rows, problem.width)
    run = lax.fori_loop(lax.div(oldest, jnp.int32(tiles.keys)), ceil_div(end, tiles.keys), body, run)
    rows, columns, where = cells(problem, tokens, used)
    result = (run.out / run.total[:, None]).astype(out.dtype)
    plgpu.store(out.at[rows, heads[:, None], columns], result, mask=where)
