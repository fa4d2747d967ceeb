"""Where jkv keeps what it can fetch or compute again, and how processes share it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from jkv.errors import ConfigError


def cache_dir() -> Path:
    """`$JKV_HOME`, else `$XDG_CACHE_HOME/jkv`, else `~/.cache/jkv`; it need not exist."""
    if home := os.environ.get("JKV_HOME"):
        return Path(home).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "jkv"
    return Path.home() / ".cache" / "jkv"


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make `directory` and hold it alone among processes; the kernel drops the lock of one that dies.

    Raises:
        ConfigError: the directory cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"the cache directory {directory} cannot be used: {error}; "
            "set JKV_HOME to a directory that can be written"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
