"""How the GPU kernels cut their work, by arithmetic on the chip and on a tile's bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jkv.errors import UnsupportedModelError

# Thread blocks of the decode kernel that share a multiprocessor: one computes while the other waits.
_DECODES_PER_CORE = 2
# Splits of a step's decodes for each thread block that runs them.
_SPLITS_PER_PROGRAM = 2
_LEAST_SPLIT = 256
# In Triton's pipeline each tile waits for its page numbers, which are loads as well: of 5 stages two are
# tiles, for which it keeps two buffers, or three where the tensor cores read them in place.
_STAGES, _DECODE_BUFFERS, _PREFILL_BUFFERS = 5, 2, 3
# Shared memory beside tiles: rearranged operands and what warps tell each other.
_RESERVE = 8 * 1024
# A tile of K, or of V. Some 64 KiB on their way hide a microsecond's latency at 40 GB/s and more a core.
_TILE_BYTES = 16 * 1024
_LEAST_SIDE, _MOST_KEYS, _MOST_EXACT_KEYS = 16, 128, 32
_PREFILL_ROWS = 128


@dataclass(frozen=True, kw_only=True)
class GpuChip:
    """What decides how work is cut: multiprocessors, and the shared memory that a thread block may have."""

    cores: int
    shared_memory: int

    @staticmethod
    def of(device: Any) -> GpuChip:
        """Of a `jax.Device`, at hand or only to compile for."""
        return GpuChip(cores=device.core_count, shared_memory=device.shared_memory_per_block_optin)


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One kernel's tiles, `[rows, head_dim]` of queries and `[keys, head_dim]` of keys and values."""

    rows: int
    keys: int
    warps: int
    stages: int

    def queries(self, group: int) -> int:
        """Queries whose `group` heads fit into the rows."""
        return self.rows // group


@dataclass(frozen=True, kw_only=True)
class GpuBlocks:
    """`programs` thread blocks share the decodes' splits, each of `least_split` keys or more. With `one_path`
    decodes run as chunks of one query: the reduction order of a query then follows from its position alone.
    """

    decode: Tiles
    prefill: Tiles
    programs: int
    least_split: int
    one_path: bool

    def extra_splits(self, kv_heads: int) -> int:
        """How many splits there may be in a step beside one for each sequence."""
        return -(-self.programs * _SPLITS_PER_PROGRAM // kv_heads)


def power_above(n: int) -> int:
    """The least side of a tile that holds n."""
    return max(_LEAST_SIDE, 1 << (n - 1).bit_length())


def gpu_blocks(
    chip: GpuChip, *, head_dim: int, group: int, product_bytes: int, stored_bytes: int, one_path: bool
) -> GpuBlocks:
    """Tiles for a model and a chip.

    Args:
        group: query heads of one KV head.
        product_bytes: of an operand of the products; 4 is float32, which tensor cores do not take.
        stored_bytes: of an element of the pool.

    Raises:
        UnsupportedModelError: heads too many or too large for the chip's shared memory.
    """
    width = power_above(head_dim)
    # Heads of 256, and operands that are multiplied one by one, take twice the registers.
    exact, wide = product_bytes > 2, width > 128
    row_bytes = width * max(product_bytes, stored_bytes)
    shared = chip.shared_memory // _DECODES_PER_CORE
    decode_keys = _keys((shared - _RESERVE) // _DECODE_BUFFERS, row_bytes, exact)
    rows = max(power_above(group), _PREFILL_ROWS >> (exact + wide))
    queries = rows * row_bytes
    prefill_keys = _keys((chip.shared_memory - _RESERVE - queries) // _PREFILL_BUFFERS, row_bytes, exact)
    need = queries + _PREFILL_BUFFERS * 2 * prefill_keys * row_bytes
    if need > chip.shared_memory - _RESERVE:
        raise UnsupportedModelError(
            f"head_dim {head_dim} with {group} query heads of one KV head: attention needs {need + _RESERVE} "
            f"bytes of shared memory, and the GPU has {chip.shared_memory}"
        )
    return GpuBlocks(
        decode=Tiles(
            rows=power_above(group), keys=decode_keys, warps=4 if group <= 32 else 8, stages=_STAGES
        ),
        prefill=Tiles(rows=rows, keys=prefill_keys, warps=4 if wide and not exact else 8, stages=_STAGES),
        programs=chip.cores * _DECODES_PER_CORE,
        least_split=_LEAST_SPLIT,
        one_path=one_path,
    )


def _keys(shared_memory: int, row_bytes: int, exact: bool) -> int:
    """Keys of a tile, so that one of K and one of V fit into the shared memory."""
    most = min(_TILE_BYTES, shared_memory // 2) // row_bytes
    return min(_MOST_EXACT_KEYS if exact else _MOST_KEYS, max(_LEAST_SIDE, 1 << most.bit_length() - 1))
