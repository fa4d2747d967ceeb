"""Arrays that can grow in place."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import DTypeLike


def memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def reserved(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Zeros as large as they can ever be: addresses only, whose memory is taken when it is first written."""
    return np.zeros(shape, dtype)
