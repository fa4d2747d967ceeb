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
# tiles, with a buffer each, and one more where the tensor cores read them in place.
_STAGES, _BUFFERS = 5, 2
# Shared memory for what warps tell each other.
SHARED_RESERVE = 1024
# A tile of K, or of V. With 64 KiB on their way to a core, a microsecond of latency is hidden up to 64 GB/s;
# an H200 has 36 for each.
TILE_BYTES = 16 * 1024
LEAST_SIDE, _MOST_KEYS, _MOST_EXACT_KEYS = 16, 128, 32
_PREFILL_ROWS = 128
# Bytes of int8 that cannot be addressed: Pallas's Triton lowering gives an array 64-bit offsets only if it
# has more than 4 GiB, and those of 32 bits are signed.
UNADDRESSABLE = range(2**31 + 1, 2**32 + 1)


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
    return max(LEAST_SIDE, 1 << (n - 1).bit_length())


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
    width, row = power_above(head_dim), power_above(group)
    # Heads of 256, and operands that are multiplied one by one, take twice the registers.
    exact, wide = product_bytes > 2, width > 128
    row_bytes = width * max(product_bytes, stored_bytes)
    most_keys = min(_MOST_EXACT_KEYS if exact else _MOST_KEYS, TILE_BYTES // row_bytes)

    def keys(rows: int, buffers: int, shared_memory: int) -> int:
        """What fits: queries, K and V in every buffer, and the weights of V on their way to the product."""
        left = shared_memory - SHARED_RESERVE - rows * row_bytes
        fit = left // (buffers * 2 * row_bytes + rows * product_bytes)
        return min(most_keys, 1 << fit.bit_length() - 1) if fit >= LEAST_SIDE else 0

    rows = max(row, _PREFILL_ROWS >> (exact + wide))
    decode_keys = keys(row, _BUFFERS, chip.shared_memory // _DECODES_PER_CORE)
    decode_keys = decode_keys or keys(row, _BUFFERS, chip.shared_memory)
    prefill_keys = keys(rows, _BUFFERS if exact else _BUFFERS + 1, chip.shared_memory)
    if not decode_keys or not prefill_keys:
        raise UnsupportedModelError(
            f"head_dim {head_dim} with {group} query heads of one KV head: attention does not fit into the "
            f"{chip.shared_memory} bytes of the GPU's shared memory"
        )
    return GpuBlocks(
        decode=Tiles(rows=row, keys=decode_keys, warps=4 if row <= 32 else 8, stages=_STAGES),
        prefill=Tiles(rows=rows, keys=prefill_keys, warps=4 if wide and not exact else 8, stages=_STAGES),
        programs=chip.cores * _DECODES_PER_CORE,
        least_split=_LEAST_SPLIT,
        one_path=one_path,
    )
