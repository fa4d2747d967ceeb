"""Arrays that can grow in place."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import DTypeLike

_FEWEST_ROWS = 4096


def memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def reserved(rows: int, columns: int, dtype: DTypeLike) -> np.ndarray:
    """Zeros as large as they can ever be: addresses only, whose memory is taken when it is first written.

    Fewer rows where the system limits addresses (`ulimit -v`, `vm.overcommit_memory=2`).
    """
    while True:
        try:
            return np.zeros((rows, columns), dtype)
        except MemoryError:
            if rows <= _FEWEST_ROWS:
                raise
            rows //= 2
