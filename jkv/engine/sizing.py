"""How many pages L1 gets: what the flags ask, against the memory that there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jkv.config import GIB, ServeConfig
from jkv.engine.host_memory import check_host_memory, host_available
from jkv.engine.programs import Program, ProgramPlan, gather_name, programs, sample_name, step_name
from jkv.engine.sampling import SamplerState
from jkv.errors import ConfigError

_CPU_L1_BYTES = GIB
# What the device's allocator and streams keep for themselves beside what programs declare.
_DEVICE_RESERVE = 0.02


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that L1 may take, at most and when no flag says; `where` says what has them."""

    available: int
    default: int
    where: str = "on the device"


@dataclass(frozen=True, kw_only=True)
class ProgramBytes:
    """What a compiled program needs on the device beside its arguments."""

    temporaries: int
    outputs: int  # those that are not donated arguments
    code: int


def plan_l1(config: ServeConfig, plan: ProgramPlan) -> int:
    """Pages of L1 for a plan whose own page count is not decided yet, and which leaves L2 its room.

    Raises:
        ConfigError: they do not fit, L2 does not, or the device does not tell what it has.
    """
    if config.l2_bytes:
        check_host_memory(config.l2_bytes, f"--l2-gib {config.l2_gib:g}")
    on_cpu = jax.default_backend() == "cpu"
    return l1_pages(config, plan.pool.page_bytes, host_memory(config) if on_cpu else device_memory(plan))


def l1_pages(config: ServeConfig, page_bytes: int, memory: Memory) -> int:
    """As many pages as `--l1-pages` or `--l1-gib` ask, else as many as the default holds.

    Raises:
        ConfigError: that is no page at all, or more than is available.
    """
    if config.l1_pages is not None:
        asked, pages = f"--l1-pages {config.l1_pages}", config.l1_pages
    elif config.l1_bytes is not None:
        asked, pages = f"--l1-gib {config.l1_bytes / GIB:g}", config.l1_bytes // page_bytes
    else:
        asked, pages = "--l1-gib not given", memory.default // page_bytes
    available = f"{memory.available} bytes available {memory.where}"
    if pages < 1:
        raise ConfigError(f"{asked}: L1 would hold no page, for one takes {page_bytes} bytes; {available}")
    if pages * page_bytes > memory.available:
        raise ConfigError(f"{asked}: {pages} pages take {pages * page_bytes} bytes; {available}")
    return pages


def host_memory(config: ServeConfig) -> Memory:
    """On CPU, L1 shares the machine's memory with L2 and everything else: a GiB unless asked otherwise."""
    available = max(0, host_available() - config.l2_bytes)
    where = f"on the host beside --l2-gib {config.l2_gib:g}" if config.l2_bytes else "on the host"
    return Memory(available=available, default=min(_CPU_L1_BYTES, available), where=where)


def device_memory(plan: ProgramPlan) -> Memory:
    """An accelerator's memory less weights, sampler state, pages on their way in and what the plan's programs
    need: all L1's.
    """
    stats = jax.local_devices()[0].memory_stats()
    if stats is None or "bytes_limit" not in stats:
        raise ConfigError(f"--l1-gib: {jax.default_backend()} devices do not tell how much memory they have")
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    every = list(programs(plan))
    names = (
        gather_name(plan.page_buckets[-1]),
        sample_name(plan.sample_buckets[-1]),
        step_name(plan.token_buckets[-1]),
    )
    largest = [program_bytes(p) for p in every if p.name in names]
    left = left_for_l1(free, state_bytes(plan) + staging_bytes(plan), largest, len(every))
    return Memory(available=left, default=left)


def left_for_l1(free: int, buffers: int, largest: Sequence[ProgramBytes], programs: int) -> int:
    """Bytes left of `free` beside other buffers and the programs: each keeps its code loaded, at most
    as much as the largest ones', and one at a time has temporaries and outputs.
    """
    running = max(p.temporaries + p.outputs for p in largest)
    code = programs * max(p.code for p in largest)
    return max(0, int(free * (1 - _DEVICE_RESERVE)) - buffers - running - code)


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
    """Bytes of pages on their way into L1: one batch is written while the next one arrives."""
    return 2 * plan.page_buckets[-1] * plan.pool.page_bytes
