"""The host's memory: what there is, refusing to promise more, and keeping it for pages. No jax."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

from jkv.config import GIB
from jkv.errors import ConfigError

_MEMINFO = Path("/proc/meminfo")
# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# The largest that every glibc takes, and more than a page of most models.
_MMAP_THRESHOLD = 32 * 2**20
_TRIM_THRESHOLD = GIB


def keep_freed_memory() -> bool:
    """Has malloc keep up to a GiB of what was freed for what comes next; True where it can (glibc). To be
    called before there are threads.

    By default it gives memory of several MiB back to the kernel, and writing to fresh memory is many times
    slower than writing to memory that pages were in before. And it has an arena for each of several threads,
    of which none uses what another has freed, and whose emptied parts it gives back whatever it was told.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    options = {_M_MMAP_THRESHOLD: _MMAP_THRESHOLD, _M_TRIM_THRESHOLD: _TRIM_THRESHOLD, _M_ARENA_MAX: 1}
    return all(mallopt(option, value) for option, value in options.items())


def host_available() -> int:
    """Bytes that processes may still take without swapping."""
    if not _MEMINFO.exists():  # macOS, which tells only what there is in all
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def check_host_memory(asked: int, flag: str) -> None:
    """Refuses to take `asked` bytes for a flag, given with its value, where the host has fewer.

    Raises:
        ConfigError: names the flag, what it asks for and what is available.
    """
    available = host_available()
    if asked > available:
        raise ConfigError(f"{flag}: that is {asked} bytes; {available} bytes available on the host")
