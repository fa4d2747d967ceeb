"""What the makers publish of the chips that plans are made for: peaks of one chip, in one direction."""

from __future__ import annotations

from dataclasses import dataclass

from jkv.cache_config import GIB
from jkv.engine.gpu_memory import MEMORY_FRACTION


@dataclass(frozen=True, kw_only=True)
class Chip:
    """`memory_bytes` is what a process gets to allocate: the `bytes_limit` of jax's memory statistics.
    `flops` and `float32_flops` are of dense matrix products as XLA computes them by default, multiplications
    and additions counted; `link_bytes_per_s` goes out to the other chips, over all links that a slice has.
    """

    name: str
    memory_bytes: int
    flops: float
    float32_flops: float
    memory_bytes_per_s: float
    host_bytes_per_s: float
    link_bytes_per_s: float
    sources: str


_GOOGLE = "https://cloud.google.com/tpu/docs"
_BOOK = "https://jax-ml.github.io/scaling-book/tpus"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/h100"

# On TPUs XLA multiplies float32 in one pass of bfloat16. A slice of 2x2 uses two of a chip's four links. The
# memory is what XLA:TPU lets a program have.
TPU_V5E = Chip(
    name="TPU v5e",
    memory_bytes=int(15.75 * GIB),
    flops=197e12,
    float32_flops=197e12,
    memory_bytes_per_s=819e9,
    host_bytes_per_s=15e9,
    link_bytes_per_s=2 * 50e9,
    sources=f"{_GOOGLE}/v5e; the host's link: {_BOOK}",
)
TPU_V6E = Chip(
    name="TPU v6e",
    memory_bytes=int(31.25 * GIB),
    flops=918e12,
    float32_flops=918e12,
    memory_bytes_per_s=1638e9,
    host_bytes_per_s=32e9,
    link_bytes_per_s=2 * 100e9,
    sources=f"{_GOOGLE}/v6e; the host's link: {_BOOK}",
)
# bfloat16 and TF32 without sparsity. NVLink and PCIe 5.0 x16 are published as the sum of both directions. Of
# the memory it is what a server has jax take.
H100 = Chip(
    name="H100 SXM",
    memory_bytes=int(84_929_347_584 * MEMORY_FRACTION),
    flops=989.4e12,
    float32_flops=494.7e12,
    memory_bytes_per_s=3.35e12,
    host_bytes_per_s=128e9 / 2,
    link_bytes_per_s=900e9 / 2,
    sources=_NVIDIA,
)
