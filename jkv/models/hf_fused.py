"""Checkpoints with one tensor for all experts of a layer, as transformers 5 has them in memory, and writes
them if told not to restore the original format.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from jkv.errors import UnsupportedModelError
from jkv.models.safetensors_source import SafetensorsSource
from jkv.models.source import TensorSource

_FUSED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One expert's projection: `rows` of the `[out, in]` that `stored`, `[experts, out, in]`, has for it."""

    stored: str
    expert: int
    rows: slice
    shape: tuple[int, int]


class FusedExpertsSource:
    """A TensorSource over another, whose fused tensors it gives as one for each expert and projection, under
    the names of Qwen3-MoE's. `gate_up_proj` has a gate's rows and then the rows of what it gates.

    Raises:
        UnsupportedModelError: a fused tensor of a shape that it cannot have, or experts that are there twice.
    """

    def __init__(self, source: SafetensorsSource) -> None:
        self._source = source
        fused = {name: match for name in source.names() if (match := _FUSED.fullmatch(name))}
        self._parts = {
            part_name: part
            for name, match in fused.items()
            for part_name, part in _parts(name, match[1], match[2], source.shape(name)).items()
        }
        whole = [name for name in source.names() if name not in fused]
        if twice := self._parts.keys() & set(whole):
            raise UnsupportedModelError(
                f"the checkpoint has the tensor {min(twice)} alone and fused with others"
            )
        self._names = tuple(sorted([*whole, *self._parts]))

    def names(self) -> tuple[str, ...]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        part = self._parts.get(name)
        return self._source.shape(name) if part is None else part.shape

    def dtype(self, name: str) -> str:
        part = self._parts.get(name)
        return self._source.dtype(name if part is None else part.stored)

    def read(self, name: str) -> np.ndarray:
        part = self._parts.get(name)
        return (
            self._source.read(name)
            if part is None
            else self._source.read(part.stored, part.expert, part.rows)
        )

    def fingerprint(self) -> bytes:
        """That of the tensors as they are stored."""
        return self._source.fingerprint()


def with_each_expert(source: SafetensorsSource) -> TensorSource:
    """The source itself where it has no fused tensors."""
    return FusedExpertsSource(source) if any(map(_FUSED.fullmatch, source.names())) else source


def _parts(stored: str, experts: str, kind: str, shape: tuple[int, ...]) -> dict[str, _Part]:
    if len(shape) != 3 or (kind == "gate_up_proj" and shape[1] % 2):
        raise UnsupportedModelError(
            f"tensor {stored} has shape {list(shape)}; allowed: [experts, out, in], with an even out for "
            "gate_up_proj"
        )
    count, rows, inputs = shape
    projections = {"down_proj": slice(0, rows)}
    if kind == "gate_up_proj":
        projections = {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}
    return {
        f"{experts}.{i}.{projection}.weight": _Part(
            stored=stored, expert=i, rows=part, shape=(part.stop - part.start, inputs)
        )
        for i in range(count)
        for projection, part in projections.items()
    }
