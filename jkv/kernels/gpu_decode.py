"""Sequences of one query on a GPU. Each sequence's keys are split among the multiprocessors, and what the
splits give is merged (Flash-Decoding, Dao et al. 2023). How long a split is follows from all that a step has
to read: the work is even whatever the lengths, and no thread block starts for a split that is not there.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jkv.kernels.gpu_blocks import GpuBlocks, power_above
from jkv.kernels.gpu_tiles import (
    MASKED,
    Operands,
    Problem,
    Running,
    accumulate,
    ceil_div,
    cells,
    load_queries,
    load_tile,
    merge,
)

# Splits that the merge reads at once.
_MERGED = 32


class Splits(NamedTuple):
    """How a step's decodes are split: sequence i into `counts[i]` of `length` keys, numbered through."""

    seqs: jax.Array  # [S] their numbers, padded
    oldest: jax.Array  # [S] first key seen, rounded down to a key block
    counts: jax.Array  # [S]
    length: jax.Array

    @property
    def total(self) -> jax.Array:
        return jnp.sum(self.counts)

    def find(self, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The sequence that a split is of, and the number of its first split."""
        passed = jnp.cumsum(self.counts) <= number
        return jnp.sum(passed.astype(jnp.int32)), jnp.sum(jnp.where(passed, self.counts, 0))

    def of(self, seq: jax.Array) -> tuple[jax.Array, jax.Array]:
        """How many splits a sequence has, and the number of its first one."""
        own = jnp.where(self.seqs == seq, self.counts, 0)
        return jnp.sum(own), jnp.sum(jnp.where(self.seqs < seq, self.counts, 0))


class Partial(NamedTuple):
    """What every split gives: a Running of each head, as arrays or refs."""

    peak: Any  # [splits, heads]
    total: Any  # [splits, heads]
    out: Any  # [splits, heads, head_dim]


def decode(ops: Operands, problem: Problem, blocks: GpuBlocks, *, interpret: bool) -> jax.Array:
    """`ops.q` with row i in place of the query of decode i."""
    seqs = min(problem.tokens, ops.kv_lens.shape[0])
    tiles, most = blocks.decode, seqs + blocks.extra_splits(problem.kv_heads)

    def f32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    parts = pl.pallas_call(
        partial(_split_kernel, problem=problem, blocks=blocks),
        out_shape=Partial(
            f32(most, problem.heads), f32(most, problem.heads), f32(most, problem.heads, problem.head_dim)
        ),
        grid=(min(blocks.programs, most * problem.kv_heads),),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        name="paged_decode",
    )(ops)
    return pl.pallas_call(
        partial(_merge_kernel, problem=problem, blocks=blocks),
        out_shape=jax.ShapeDtypeStruct(ops.q.shape, ops.q.dtype),
        grid=(seqs, problem.heads),
        input_output_aliases={0: 0},
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        name="paged_decode_merge",
    )(ops, parts)


def _splits(ops: Operands, problem: Problem, blocks: GpuBlocks) -> Splits:
    keys = blocks.decode.keys
    index = jnp.arange(power_above(ops.kv_lens.shape[0]))
    kv_lens = plgpu.load(ops.kv_lens.at[index], mask=index < ops.counts[0], other=0)
    oldest = _block_start(jnp.maximum(kv_lens - ops.window[0], 0), keys)
    seen = kv_lens - oldest
    # At most a split more for each sequence than `extra_splits`.
    length = ceil_div(jnp.sum(seen), blocks.extra_splits(problem.kv_heads))
    length = jnp.maximum(ceil_div(length, keys) * keys, blocks.least_split)
    return Splits(index, oldest, ceil_div(seen, length), length)


def _split_kernel(ops: Operands, *parts: Any, problem: Problem, blocks: GpuBlocks) -> None:
    """Runs of splits and heads: program i takes every n-th from the i-th on."""
    splits = _splits(ops, problem, blocks)
    first, step = pl.program_id(0), pl.num_programs(0)
    kv_heads = jnp.int32(problem.kv_heads)
    work = splits.total * problem.kv_heads

    def body(i: jax.Array, _: None) -> None:
        item = first + i * step
        _split(
            ops, Partial(*parts), problem, blocks, splits, lax.div(item, kv_heads), lax.rem(item, kv_heads)
        )

    lax.fori_loop(0, ceil_div(work - first, step), body, None)


def _split(
    ops: Operands,
    parts: Partial,
    problem: Problem,
    blocks: GpuBlocks,
    splits: Splits,
    number: jax.Array,
    head: jax.Array,
) -> None:
    tiles, group = blocks.decode, problem.group
    seq, first = splits.find(number)
    kv_len = ops.kv_lens[seq]
    oldest = jnp.maximum(kv_len - ops.window[0], 0)
    start = _block_start(oldest, tiles.keys) + (number - first) * splits.length
    end = jnp.minimum(start + splits.length, kv_len)

    row = jnp.arange(tiles.rows)
    heads = head * group + row
    q = load_queries(ops, problem, jnp.full_like(row, seq), heads, row < group)

    def body(block: jax.Array, run: Running) -> Running:
        keys = block * tiles.keys + jnp.arange(tiles.keys)
        seen = (keys >= oldest) & (keys < end)
        return accumulate(problem, run, q, load_tile(ops, problem, seq, head, keys, seen), seen[None, :])

    run = Running.empty(tiles.rows, problem.width)
    run = lax.fori_loop(lax.div(start, jnp.int32(tiles.keys)), ceil_div(end, tiles.keys), body, run)
    # Where masked, past the end: Pallas's interpreter drops such writes.
    used = row < group
    heads = jnp.where(used, heads, problem.heads)
    plgpu.store(parts.peak.at[number, heads], run.peak, mask=used)
    plgpu.store(parts.total.at[number, heads], run.total, mask=used)
    rows, columns, where = cells(problem, heads, used)
    plgpu.store(parts.out.at[number, rows, columns], run.out, mask=where)


def _merge_kernel(ops: Operands, parts: Partial, out: Any, *, problem: Problem, blocks: GpuBlocks) -> None:
    seq, head = pl.program_id(0), pl.program_id(1)

    @pl.when(seq < ops.counts[0])
    def _run() -> None:
        count, first = _splits(ops, problem, blocks).of(seq)

        def body(i: jax.Array, run: Running) -> Running:
            index = i * _MERGED + jnp.arange(_MERGED)
            used = index < count
            rows, columns, where = cells(problem, first + index, used)
            return merge(
                run,
                Running(
                    plgpu.load(parts.peak.at[first + index, head], mask=used, other=MASKED),
                    plgpu.load(parts.total.at[first + index, head], mask=used, other=0),
                    plgpu.load(parts.out.at[rows, head, columns], mask=where, other=0),
                ),
            )

        run = lax.fori_loop(0, ceil_div(count, _MERGED), body, Running.empty(1, problem.width))
        rows, columns, where = cells(problem, jnp.full((1,), seq), jnp.full((1,), True))
        result = (run.out / run.total[:, None]).astype(out.dtype)
        plgpu.store(out.at[rows, head, columns], result, mask=where)


def _block_start(key: jax.Array, keys: int) -> jax.Array:
    """The first of the key block that a key is in."""
    return lax.div(key, jnp.int32(keys)) * keys
