"""Rows sorted by expert times their expert's weights, on a GPU, by Pallas's Triton lowering. XLA:GPU makes of
`jax.lax.ragged_dot` a product of all rows with every expert.

A tile of rows is of one expert. Where it reaches past the expert's last row, it multiplies that row again and
stores nothing (the blocks of MegaBlocks, Gale et al., arXiv:2211.15841, without the padding of rows).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jkv.kernels.gpu_blocks import power_above
from jkv.kernels.gpu_grouped_tiles import GroupedTiles
from jkv.kernels.gpu_tiles import ceil_div, dot


def grouped_product(rows: jax.Array, weights: jax.Array, sizes: jax.Array, tiles: GroupedTiles) -> jax.Array:
    """`[R, in]` and `[experts, in, out]` to `[R, out]`, in the dtype of `rows`, with float32 sums.

    Args:
        sizes: `[experts]`, int32: how many rows each expert has, one after the other. Rows behind them have
            no expert and give unspecified rows.
    """
    count, experts, width = rows.shape[0], weights.shape[0], weights.shape[2]
    # Every expert may have a tile that is not full.
    row_tiles = min(count, count // tiles.rows + experts)
    return pl.pallas_call(
        partial(_kernel, tiles=tiles),
        out_shape=jax.ShapeDtypeStruct((count, width), rows.dtype),
        # Programs that follow each other share their rows, and all of an expert its weights: both stay in L2.
        grid=(pl.cdiv(width, tiles.columns), row_tiles),
        interpret=tiles.interpret,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        name="grouped_product",
    )(rows, weights, sizes)


def _kernel(rows: Any, weights: Any, sizes: Any, out: Any, *, tiles: GroupedTiles) -> None:
    index = jnp.arange(power_above(sizes.shape[0]))
    counts = plgpu.load(sizes.at[index], mask=index < sizes.shape[0], other=0)
    blocks = ceil_div(counts, tiles.rows)
    across, tile = pl.program_id(0), pl.program_id(1)

    @pl.when(tile < jnp.sum(blocks))
    def _run() -> None:
        passed = jnp.cumsum(blocks) <= tile
        expert = jnp.sum(passed.astype(jnp.int32))
        start = jnp.sum(jnp.where(passed, counts, 0))
        end = start + jnp.sum(jnp.where(index == expert, counts, 0))
        first = start + (tile - jnp.sum(jnp.where(passed, blocks, 0))) * tiles.rows
        _tile(rows, weights, out, expert, first, end, across, tiles)


def _tile(
    rows: Any,
    weights: Any,
    out: Any,
    expert: jax.Array,
    first: jax.Array,
    end: jax.Array,
    across: jax.Array,
    tiles: GroupedTiles,
) -> None:
    """The rows `first ...` before `end`, of one expert, in the columns of tile `across`."""
    _, depth, width = weights.shape
    row = first + jnp.arange(tiles.rows)
    used = jnp.minimum(row, end - 1)
    column = across * tiles.columns + jnp.arange(tiles.columns)
    even_depth, even_width = depth % tiles.depth == 0, width % tiles.columns == 0

    def body(i: jax.Array, total: jax.Array) -> jax.Array:
        inner = i * tiles.depth + jnp.arange(tiles.depth)
        x = _load(rows.at[used[:, None], inner[None, :]], inner[None, :] < depth, even_depth)
        exists = (inner[:, None] < depth) & (column[None, :] < width)
        w = _load(weights.at[expert, inner[:, None], column[None, :]], exists, even_depth and even_width)
        return total + dot(x, w, contract=0)

    total = jnp.zeros((tiles.rows, tiles.columns), jnp.float32)
    total = lax.fori_loop(0, pl.cdiv(depth, tiles.depth), body, total)
    exists = (row[:, None] < end) & (column[None, :] < width)
    plgpu.store(out.at[row[:, None], column[None, :]], total.astype(out.dtype), mask=exists)


def _load(ref: Any, exists: jax.Array, all_exist: bool) -> jax.Array:
    """Zero where nothing exists. Of a mask Triton has to find out that it leaves whole vectors."""
    if all_exist:
        return plgpu.load(ref)
    return plgpu.load(ref, mask=jnp.broadcast_to(exists, ref.shape), other=0)
