"""The kernels that CPUs have, in C++ for XLA's foreign function interface: compiled for this processor at a
first start, with the compiler that the machine has.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from pathlib import Path

import jax

from jkv.errors import ConfigError
from jkv.paths import cache_dir, locked

_SOURCES = Path(__file__).parent / "cpu"
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-w")
_SYMBOLS = ("jkv_attention", "jkv_product")

_log = logging.getLogger(__name__)


@functools.cache
def available() -> bool:
    """Whether programs may call the kernels; compiles and registers them at the first call. Without a
    compiler, `$CXX` or `c++`, it logs why not, and XLA's own code does the same work slower.
    """
    try:
        library = ctypes.CDLL(str(_built()))
        for symbol in _SYMBOLS:
            handler = jax.ffi.pycapsule(getattr(library, symbol))
            jax.ffi.register_ffi_target(symbol, handler, platform="cpu")
    except (OSError, subprocess.SubprocessError, ConfigError) as error:
        _log.warning("CPU kernels cannot be had, XLA's slower code runs instead: %s", _reason(error))
        return False
    return True


def _built() -> Path:
    """The library's file."""
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    sources = sorted(_SOURCES.iterdir())
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
    parts = [version, *(path.read_bytes() for path in sources), _processor(), repr(_FLAGS).encode()]
    parts.append(importlib.metadata.version("jaxlib").encode())
    digest = hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()
    directory = cache_dir() / "cpu"
    target = directory / f"{digest}.so"
    if target.exists():
        return target
    units = [str(path) for path in sources if path.suffix == ".cc"]
    with locked(directory), tempfile.TemporaryDirectory(dir=directory) as building:
        if target.exists():
            return target
        _log.info("compiling kernels for this processor with %s", compiler[0])
        made = Path(building) / target.name
        command = [*compiler, *_FLAGS, "-isystem", jax.ffi.include_dir(), *units, "-o", str(made)]
        subprocess.run(command, capture_output=True, check=True)
        made.replace(target)
    return target


def _processor() -> bytes:
    """What `-march=native` goes by: a home directory may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)})).encode()


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"{error.cmd[0]} ended with status {error.returncode}: {error.stderr.decode()[-500:]}"
    return str(error)
