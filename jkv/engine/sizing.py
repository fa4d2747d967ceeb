"""How many pages L1 gets: what the flags ask, against the memory that there is on this machine."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from jkv.config import GIB, ServeConfig
from jkv.engine.host_memory import check_host_memory, host_available
from jkv.engine.l1_size import Memory, ProgramBytes, divide, l1_pages
from jkv.engine.programs import Program, ProgramPlan, gather_name, programs, sample_name, step_name
from jkv.engine.sampling import SamplerState
from jkv.errors import ConfigError
from jkv.kernels.gpu_blocks import UNADDRESSABLE
from jkv.kernels.mesh import own_devices

_CPU_L1_BYTES = GIB


def plan_l1(config: ServeConfig, plan: ProgramPlan) -> int:
    """Pages of L1 for a plan whose own page count is not decided yet, and which leaves L2 its room.

    Raises:
        ConfigError: they do not fit, L2 does not, or the device does not tell what it has.
    """
    if config.l2_bytes:
        check_host_memory(config.l2_bytes, f"--l2-gib {config.l2_gib:g}")
    on_cpu = jax.default_backend() == "cpu"
    memory = (
        _shared(host_memory(config), config.tp // config.num_processes) if on_cpu else device_memory(plan)
    )
    return l1_pages(config, plan.pool.device_page_bytes, memory)


def host_memory(config: ServeConfig, to_come: int = 0) -> Memory:
    """On CPU, L1 shares the machine's memory with L2 and everything else: a GiB unless asked otherwise.
    `to_come` are bytes that are not taken yet, but will be before L1.
    """
    available = max(0, host_available() - config.l2_bytes - to_come)
    where = f"on the host beside --l2-gib {config.l2_gib:g}" if config.l2_bytes else "on the host"
    return Memory(available=available, default=min(_CPU_L1_BYTES, available), where=where)


def device_memory(plan: ProgramPlan) -> Memory:
    """Each accelerator's memory less weights, sampler state, pages on their way in and what the plan's
    programs need: all L1's.
    """
    devices = own_devices(plan.mesh) if isinstance(plan.mesh, Mesh) else jax.local_devices()[:1]
    free = min(_free(device) for device in devices)
    every = list(programs(plan))
    largest = [program_bytes(p) for p in every if p.name in largest_programs(plan)]
    return for_l1(plan, divide(free, state_bytes(plan) + staging_bytes(plan), largest, len(every)).left)


def for_l1(plan: ProgramPlan, left: int) -> Memory:
    """The `left` bytes of an accelerator, or of them those of the largest int8 pool that a GPU addresses."""
    page, values = plan.pool.device_page_bytes, plan.pool.device_page_values
    if plan.platform != "gpu" or not plan.pool.quantized or left // page * values not in UNADDRESSABLE:
        return Memory(available=left, default=left)
    most = (UNADDRESSABLE.start - 1) // values * page
    return Memory(available=most, default=most, where="for int8, of which a GPU addresses 2 GiB or over 4")


def _shared(memory: Memory, devices: int) -> Memory:
    """Each device's part, where the host's memory is that of all of them."""
    if devices == 1:
        return memory
    where = f"{memory.where} for each of {devices} devices"
    return Memory(available=memory.available // devices, default=memory.default // devices, where=where)


def _free(device: Any) -> int:
    stats = device.memory_stats()
    if stats is None or "bytes_limit" not in stats:
        raise ConfigError(f"--l1-gib: {jax.default_backend()} devices do not tell how much memory they have")
    return stats["bytes_limit"] - stats["bytes_in_use"]


def largest_programs(plan: ProgramPlan) -> tuple[str, str, str]:
    """The names of the programs that need most memory: those of the largest buckets."""
    return (
        gather_name(plan.page_buckets[-1]),
        sample_name(plan.sample_buckets[-1]),
        step_name(plan.token_buckets[-1]),
    )


def program_bytes(program: Program) -> ProgramBytes:
    """Compiles a program to ask what it needs.

    Raises:
        ConfigError: the platform does not say.
    """
    analysis = program.lower().compile().memory_analysis()
    if analysis is None:
        raise ConfigError(f"--l1-gib: {jax.default_backend()} does not tell how much memory programs need")
    return ProgramBytes(
        temporaries=analysis.temp_size_in_bytes,
        outputs=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
    )


def state_bytes(plan: ProgramPlan) -> int:
    """Bytes of the sampler's state."""
    state = SamplerState.abstract(plan.max_num_seqs, plan.config.vocab_size)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def staging_bytes(plan: ProgramPlan) -> int:
    """Bytes of pages on their way into a device's L1: one batch is written while the next one arrives."""
    return 2 * plan.page_buckets[-1] * plan.pool.device_page_bytes
