"""Checkpoints of Hugging Face whose tensors have other names than the parameters that they fill."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import numpy as np

from jkv.errors import UnsupportedModelError
from jkv.models.hf_fused import with_each_expert
from jkv.models.hf_text import MULTIMODAL
from jkv.models.safetensors_source import SafetensorsSource
from jkv.models.source import TensorSource

_log = logging.getLogger(__name__)
_MIXTRAL = re.compile(r"(model\.layers\.\d+\.)block_sparse_moe\.(gate|experts\.\d+)(?:\.(w[123]))?\.weight")
_PROJECTIONS = {"w1": ".gate_proj", "w2": ".down_proj", "w3": ".up_proj", None: ""}
# Before and since transformers 4.52; `lm_head` has no prefix since.
_TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model."}
_OF_IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")


class RenamedSource:
    """A TensorSource over another, whose tensors it gives other names; those without one it leaves out."""

    def __init__(self, source: TensorSource, stored: Mapping[str, str]) -> None:
        self._source = source
        self._stored = stored

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._stored))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._stored.get(name, name))

    def dtype(self, name: str) -> str:
        return self._source.dtype(self._stored.get(name, name))

    def read(self, name: str) -> np.ndarray:
        return self._source.read(self._stored.get(name, name))

    def fingerprint(self) -> bytes:
        """That of all the tensors of the other source."""
        return self._source.fingerprint()


def with_parameter_names(source: SafetensorsSource, architecture: str) -> TensorSource:
    """Gives each expert's tensors, fused ones too, the names that Qwen3-MoE's have, and leaves of a
    multimodal checkpoint the text model, with a warning.

    Raises:
        UnsupportedModelError: an expert that is there twice, or experts of a shape that they cannot have.
    """
    if architecture == "Qwen3MoeForCausalLM":
        return with_each_expert(source)
    if architecture == "MixtralForCausalLM":
        return _mixtral(with_each_expert(source))
    if architecture not in MULTIMODAL:
        return source
    text = [name for name in source.names() if not _OF_IMAGES.match(name)]
    if left_out := len(source.names()) - len(text):
        _log.warning(
            "%s: jkv serves its text model and leaves out the %d tensors for images", architecture, left_out
        )
    return RenamedSource(source, {_of_text(name): name for name in text})


def _mixtral(source: TensorSource) -> TensorSource:
    stored: dict[str, str] = {}
    for name in source.names():
        if (first := stored.setdefault(_of_mixtral(name), name)) != name:
            raise UnsupportedModelError(f"the checkpoint has the tensors {first} and {name}, which are one")
    return RenamedSource(source, stored)


def _of_mixtral(name: str) -> str:
    if (match := _MIXTRAL.fullmatch(name)) is None:
        return name
    layer, module, projection = match.groups()
    return f"{layer}mlp.{module}{_PROJECTIONS[projection]}.weight"


def _of_text(name: str) -> str:
    for prefix, replacement in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name
