"""The rules by which L1 gets its size, from bytes that were measured or computed elsewhere. No jax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jkv.config import GIB, ServeConfig
from jkv.errors import ConfigError

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


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How a device's free bytes are divided: `left` is L1's."""

    free: int
    reserve: int
    buffers: int
    running: int
    code: int

    @property
    def left(self) -> int:
        return max(0, self.free - self.reserve - self.buffers - self.running - self.code)


def divide(free: int, buffers: int, largest: Sequence[ProgramBytes], programs: int) -> Budget:
    """What `free` bytes, beside the weights, have to hold beside L1: other buffers, and the programs, of
    which each keeps its code loaded, at most as much as the largest ones', and one at a time has temporaries
    and outputs.
    """
    return Budget(
        free=free,
        reserve=free - int(free * (1 - _DEVICE_RESERVE)),
        buffers=buffers,
        running=max(p.temporaries + p.outputs for p in largest),
        code=programs * max(p.code for p in largest),
    )


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
