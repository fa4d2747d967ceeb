"""Where a model's tensors come from, whatever the file format."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class TensorSource(Protocol):
    """Tensors by Hugging Face name, in Hugging Face orientation (`[out, in]` for linear layers).

    Reads are thread-safe: the loader reads several tensors at once.
    """

    def names(self) -> tuple[str, ...]:
        """Every tensor of the checkpoint, sorted."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """The stored type as its format spells it (`float32`, `bfloat16`, `Q4_1`): part of the
        fingerprint.
        """
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32, float16 or ml_dtypes.bfloat16, dequantized where needed."""
        ...

    def fingerprint(self) -> bytes:
        """16 bytes that identify the weights: names, shapes, dtypes, sizes and sampled blocks of each
        tensor.
        """
        ...
