from __future__ import annotations

import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from jkv.engine import host_memory
from jkv.engine.host_memory import check_host_memory
from jkv.errors import ConfigError

# Ten threads, one after the other, fill 32 blocks of 3 MiB: how many pages of memory the kernel had to bring.
_FAULTS = """
import ctypes, resource, threading
from jkv.engine.host_memory import keep_freed_memory
kept = {keep} and keep_freed_memory()
malloc, free, memset = (getattr(ctypes.CDLL(None), name) for name in ("malloc", "free", "memset"))
malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
free.argtypes, memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def fill():
    blocks = [malloc(3 << 20) for _ in range(32)]
    for block in blocks:
        memset(block, 1, 3 << 20)
    for block in blocks:
        free(block)
for _ in range(10):
    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc can be told")
def test_freed_blocks_are_used_again() -> None:
    once = 32 * (3 << 20) // resource.getpagesize()
    assert _faults(keep=False) > 5 * once
    assert _faults(keep=True) < 2 * once


def test_elsewhere_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.delattr(host_memory, "ctypes")
    assert not host_memory.keep_freed_memory()


def test_more_than_the_host_has_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 17 kB\n")
    monkeypatch.setattr(host_memory, "_MEMINFO", meminfo)
    check_host_memory(17 * 1024, "--l2-gib 1")
    with pytest.raises(ConfigError, match=r"^--l2-gib 1: that is 17409 bytes; 17408 bytes available"):
        check_host_memory(17 * 1024 + 1, "--l2-gib 1")


def _faults(*, keep: bool) -> int:
    run = subprocess.run(
        [sys.executable, "-c", _FAULTS.format(keep=keep)], capture_output=True, text=True, check=True
    )
    return int(run.stdout)
