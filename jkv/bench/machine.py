"""The speeds of this machine's memory and disk, to hold the cache's against. Blocking; run it in a thread.

Every figure is bytes a second, the median of several passes over the same amount in blocks of one size.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_PASSES = 3


@dataclass(frozen=True, kw_only=True)
class MachineSpeeds:
    """`pwrite_sync` flushes every block (fsync); `pread` reads what the page cache has into warm buffers."""

    memcpy: float
    pwrite: float
    pwrite_sync: float
    pread: float


def measure(directory: Path, block_bytes: int, blocks: int) -> MachineSpeeds:
    """Copies, writes and reads `blocks` blocks; the files are made in `directory` and removed."""
    data = np.random.default_rng(0).integers(256, size=block_bytes, dtype=np.uint8)
    with tempfile.TemporaryDirectory(prefix="jkv-bench-", dir=directory) as made:
        root = Path(made)
        plain = _speed(lambda: _write(root, data, blocks, sync=False), block_bytes * blocks)
        buffers = [data.copy() for _ in range(blocks)]  # written once: no memory is touched first below
        return MachineSpeeds(
            memcpy=_memcpy(data, buffers),
            pwrite=plain,
            pread=_speed(lambda: _read(root, buffers), block_bytes * blocks),
            pwrite_sync=_speed(lambda: _write(root, data, blocks, sync=True), block_bytes * blocks),
        )


def _memcpy(data: np.ndarray, buffers: Sequence[np.ndarray]) -> float:
    sources = [data.copy() for _ in buffers]

    def copy() -> None:
        for source, into in zip(sources, buffers, strict=True):
            np.copyto(into, source)

    return _speed(copy, data.nbytes * len(buffers))


def _write(root: Path, data: np.ndarray, blocks: int, *, sync: bool) -> None:
    """A new file for each block, as a page has one."""
    for number in range(blocks):
        path = root / str(number)
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        try:
            view, written = data.data, 0
            while written < len(view):
                written += os.pwrite(file, view[written:], written)
            if sync:
                os.fsync(file)
        finally:
            os.close(file)


def _read(root: Path, buffers: Sequence[np.ndarray]) -> None:
    for number, buffer in enumerate(buffers):
        file = os.open(root / str(number), os.O_RDONLY)
        try:
            done = 0
            while done < buffer.nbytes:
                done += os.preadv(file, [buffer.data[done:]], done)
        finally:
            os.close(file)


def _speed(work: Callable[[], None], amount: int) -> float:
    seconds = []
    for _ in range(_PASSES):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return amount / statistics.median(seconds)
