"""How the GPU's product of experts is cut, by arithmetic on the chip and on a tile's bytes."""

from __future__ import annotations

from dataclasses import dataclass

from jkv.kernels.gpu_blocks import LEAST_SIDE, SHARED_RESERVE, TILE_BYTES, GpuChip

# Of buffers; with TILE_BYTES of weights in each, what is on its way hides the memory's latency.
_MOST_STAGES = 4
_MOST_ROWS, _MOST_EXACT_ROWS = 128, 64
# Few rows wait for weights, and narrow tiles of these are more programs to ask for them.
_COLUMNS, _COLUMNS_OF_FEW_ROWS = 128, 64
_MOST_EXACT_DEPTH = 32


@dataclass(frozen=True, kw_only=True)
class GroupedTiles:
    """Tiles of `[rows, depth]` times `[depth, columns]`. With `interpret` the kernel runs as an XLA program,
    on any device.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    interpret: bool = False


def grouped_tiles(
    chip: GpuChip, *, rows: int, experts: int, product_bytes: int, batch_invariant: bool
) -> GroupedTiles:
    """Tiles for a step.

    Args:
        rows: of all experts together; a tile has about as many as an expert gets on average.
        product_bytes: of an operand; 4 is float32, which tensor cores do not take.
        batch_invariant: the same tiles whatever `rows`: other ones would round differently.
    """
    exact = product_bytes > 2
    most = _MOST_EXACT_ROWS if exact else _MOST_ROWS
    average = most if batch_invariant else rows // experts
    height = min(most, max(LEAST_SIDE, 1 << average.bit_length()))
    many = height > 32
    columns = _COLUMNS if many and not exact else _COLUMNS_OF_FEW_ROWS
    depth = TILE_BYTES // (columns * product_bytes)
    depth = min(depth, _MOST_EXACT_DEPTH) if exact else depth
    stage_bytes = (height + columns) * depth * product_bytes
    return GroupedTiles(
        rows=height,
        columns=columns,
        depth=depth,
        warps=8 if many and not exact else 4,
        stages=max(1, min(_MOST_STAGES, (chip.shared_memory - SHARED_RESERVE) // stage_bytes)),
    )
