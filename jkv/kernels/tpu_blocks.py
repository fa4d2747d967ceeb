"""How the TPU kernel cuts its work, by arithmetic on the chip's memories and on a token's bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.kernels.kv_pool import PoolShape
from jkv.kernels.tpu_lanes import LANES, Heads

# As jax names devices and Pallas their chips.
_CHIPS = {
    "TPU v4": pltpu.ChipVersion.TPU_V4,
    "TPU v5 lite": pltpu.ChipVersion.TPU_V5E,
    "TPU v5": pltpu.ChipVersion.TPU_V5P,
    "TPU v6 lite": pltpu.ChipVersion.TPU_V6E,
}
# Until a copy's first byte arrives: as many bytes as the memory gives in this time must be on their way.
_LATENCY_S = 2e-6
# Attended to at once when decoding: with less, the arrays would idle between products that need each other.
_DECODE_BYTES = 512 * 1024
_DECODE_QUERIES, _SUBLANES = 8, 8
_LEAST_KEYS, _PREFILL_KEYS, _MOST_KEYS, _MOST_COPIED = 128, 512, 1024, 4096
_MOST_ROWS = 512
# Of a core's memories, what blocks are cut to by the arithmetic here, and what the compiler may then take.
_SHARE, _MOST_SHARE = 0.5, 0.75


@dataclass(frozen=True, kw_only=True)
class TpuChip:
    """One core: its memories in bytes, HBM's speed and that of bfloat16 products."""

    vmem_bytes: int
    smem_bytes: int
    bytes_per_s: int
    flops: int

    @staticmethod
    def of(device: Any) -> TpuChip:
        """Of a `jax.Device`, at hand or only to compile for.

        Raises:
            ConfigError: its kind is not known.
        """
        return TpuChip.of_kind(device.device_kind)

    @staticmethod
    def of_kind(kind: str) -> TpuChip:
        """Of the devices that jax calls so; raises as `of`."""
        if kind not in _CHIPS:
            raise ConfigError(f"device {kind!r}: attention knows {', '.join(_CHIPS)}")
        info = pltpu.get_tpu_info_for_chip(_CHIPS[kind], 1)
        return TpuChip(
            vmem_bytes=info.vmem_capacity_bytes,
            smem_bytes=info.smem_capacity_bytes,
            bytes_per_s=info.mem_bw_bytes_per_second,
            flops=info.bf16_ops_per_second,
        )


@dataclass(frozen=True, kw_only=True)
class BlockSize:
    """Tokens: of a block of queries, of the keys that are attended to at once, and of those whose pages are
    copied at once. `queries` is a power of two; `keys` are whole pages, and `copied` a multiple of them.
    """

    queries: int
    keys: int
    copied: int

    def for_tokens(self, tokens: int) -> BlockSize:
        """With no more queries than a step of `tokens` fills."""
        return replace(self, queries=min(self.queries, _power_from(tokens)))


@dataclass(frozen=True, kw_only=True)
class TpuBlocks:
    """Block sizes of decodes and of prefill chunks. Where `keys` are equal, so are the bits of both."""

    decode: BlockSize
    prefill: BlockSize
    vmem_limit: int  # bytes that a kernel may take


@dataclass(frozen=True, kw_only=True)
class TpuWork:
    """What a device attends with. `seqs` and `table_width` are the page table's."""

    heads: Heads
    page_size: int
    q_dtype: jnp.dtype
    kv_dtype: jnp.dtype
    seqs: int
    table_width: int

    @staticmethod
    def of(pool: PoolShape, num_heads: int, q_dtype: DTypeLike, seqs: int, table_width: int) -> TpuWork:
        """Of one of the `pool.tp` devices that share `num_heads` query heads."""
        kv_heads = pool.device_heads
        return TpuWork(
            heads=Heads(kv_heads=kv_heads, group=num_heads // pool.tp // kv_heads, head_dim=pool.head_dim),
            page_size=pool.page_size,
            q_dtype=jnp.dtype(q_dtype),
            kv_dtype=jnp.dtype(pool.dtype),
            seqs=seqs,
            table_width=table_width,
        )

    @property
    def product_dtype(self) -> jnp.dtype:
        """Of the products' operands."""
        return product_dtype(self.q_dtype, self.kv_dtype)

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values in one layer, scales included."""
        scales = 2 * self.heads.kv_heads * 4 if self.kv_dtype == jnp.int8 else 0
        return self.heads.width * self.kv_dtype.itemsize + scales

    def vmem_bytes(self, block: BlockSize) -> int:
        """What a kernel takes: queries and outputs, each twice; pages, twice; the running softmax; and for
        every row and key of a step the logits, what is seen of them, their weights and these rounded.
        Products of float32 take each operand apart into three of bfloat16.
        """
        heads = self.heads
        rows = _whole(heads.group * block.queries, 2 * _SUBLANES)
        per_row = (
            2 * _whole(heads.key_lanes, LANES) * self.product_dtype.itemsize
            + 2 * _whole(heads.value_lanes, LANES) * self.q_dtype.itemsize
            + (2 * LANES + _whole(heads.value_lanes, LANES)) * 4
        )
        lanes = heads.key_lanes + heads.value_lanes
        copies = 2 if self.product_dtype == jnp.float32 else 1
        step = block.keys * ((3 + copies) * rows + (1 + copies) * lanes) * 4
        return heads.kv_heads * rows * per_row + 2 * block.copied * self.token_bytes + step

    @property
    def smem_bytes(self) -> int:
        """Two rows of the page table, and three numbers a sequence."""
        return 4 * (2 * self.table_width + 3 * self.seqs)


def product_dtype(q_dtype: jnp.dtype, kv_dtype: jnp.dtype) -> jnp.dtype:
    """What queries, keys and values are multiplied in: bfloat16 holds all that bfloat16 and int8 do."""
    return jnp.dtype(jnp.float32 if jnp.float32 in (q_dtype, kv_dtype) else jnp.bfloat16)


def tpu_blocks(chip: TpuChip, work: TpuWork, *, batch_invariant: bool) -> TpuBlocks:
    """The block sizes for a chip.

    Raises:
        UnsupportedModelError: heads that a pool's rows cannot hold without a copy of the pool.
        ConfigError: so with int8's scales, or not even the smallest blocks fit into the chip's memories.
    """
    _check(chip, work)
    prefill = _fitted(chip, work, _prefill_block(chip, work))
    keys = prefill.keys if batch_invariant else _decode_keys(work)
    decode = BlockSize(queries=_DECODE_QUERIES, keys=keys, copied=_copied(chip, work, keys))
    return TpuBlocks(
        decode=_fitted(chip, work, decode), prefill=prefill, vmem_limit=int(chip.vmem_bytes * _MOST_SHARE)
    )


def _check(chip: TpuChip, work: TpuWork) -> None:
    heads = work.heads
    # XLA:TPU stores such a pool in an order of its own, and would copy all of it before each kernel.
    if heads.width % LANES:
        raise UnsupportedModelError(
            f"head_dim {heads.head_dim} with {heads.kv_heads} KV heads: keys and values of a token take "
            f"{heads.width} elements on a TPU; allowed: multiples of {LANES}"
        )
    scales = 2 * heads.kv_heads * work.page_size
    if work.kv_dtype == jnp.int8 and scales % LANES:
        raise ConfigError(
            f"--kv-dtype int8, --page-size {work.page_size} with {heads.kv_heads} KV heads: the scales of a "
            f"page take {scales} elements on a TPU; allowed: multiples of {LANES}, as with larger pages"
        )
    if work.smem_bytes > chip.smem_bytes * _SHARE:
        raise ConfigError(
            f"--max-model-len of {work.table_width} pages of --page-size {work.page_size}, --max-num-seqs "
            f"{work.seqs}: attention would take {work.smem_bytes} bytes of a TPU's scalar memory; allowed: "
            f"{int(chip.smem_bytes * _SHARE)}"
        )


def _prefill_block(chip: TpuChip, work: TpuWork) -> BlockSize:
    """As many queries as take about as long to compute with a key as the memory takes to bring it. A key and
    value of D elements of b bytes take 4 * D operations for every row, and 2 * D * b bytes.
    """
    rows = chip.flops / chip.bytes_per_s * work.kv_dtype.itemsize / 2
    rows = min(_MOST_ROWS, _power_from(int(rows)))
    queries = max(_DECODE_QUERIES, _power_from(rows // work.heads.group))
    keys = max(_PREFILL_KEYS, work.page_size)
    return BlockSize(queries=queries, keys=keys, copied=_copied(chip, work, keys))


def _decode_keys(work: TpuWork) -> int:
    keys = _power_from(_DECODE_BYTES // work.token_bytes)
    return max(work.page_size, min(max(keys, _LEAST_KEYS), _MOST_KEYS))


def _copied(chip: TpuChip, work: TpuWork, keys: int) -> int:
    tokens = _power_from(int(chip.bytes_per_s * _LATENCY_S) // work.token_bytes)
    return max(keys, min(tokens, _MOST_COPIED))


def _fitted(chip: TpuChip, work: TpuWork, block: BlockSize) -> BlockSize:
    """The block, halved until it fits: first what is copied ahead, then queries, then keys."""
    allowed = int(chip.vmem_bytes * _SHARE)
    while work.vmem_bytes(block) > allowed:
        if block.copied > block.keys:
            block = replace(block, copied=block.copied // 2)
        elif block.queries > _DECODE_QUERIES:
            block = replace(block, queries=block.queries // 2)
        elif block.keys > max(_LEAST_KEYS, work.page_size):
            block = replace(block, keys=block.keys // 2, copied=block.keys // 2)
        else:
            raise ConfigError(
                f"--page-size {work.page_size}: attention to {block.keys} tokens of {work.token_bytes} bytes "
                f"would take {work.vmem_bytes(block)} bytes of a TPU's vector memory; allowed: {allowed}"
            )
    return block


def _power_from(n: int) -> int:
    """The least power of two that is n or more."""
    return 1 << max(0, n - 1).bit_length()


def _whole(n: int, unit: int) -> int:
    return -(-n // unit) * unit
