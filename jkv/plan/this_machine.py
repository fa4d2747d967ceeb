"""The machine that jkv.plan runs on, in the terms of a chip."""

from __future__ import annotations

from jkv.bench.calibrate import calibrate
from jkv.engine.host_memory import host_available
from jkv.plan.chips import Chip


def this_machine() -> Chip:
    """Its CPU's speeds are measured, in a few seconds; a copy from L2 to L1 reads and writes memory.

    Raises:
        JkvError: the measurement failed.
    """
    measured = calibrate()
    read = measured.memory_read_gb_per_s * 1e9
    return Chip(
        name="this machine's CPU",
        memory_bytes=host_available(),
        flops=measured.matmul_gflops * 1e9,
        float32_flops=measured.matmul_gflops * 1e9,
        memory_bytes_per_s=read,
        host_bytes_per_s=read / 2,
        link_bytes_per_s=read / 2,
        sources="measured just now; of the memory, what is free",
    )
