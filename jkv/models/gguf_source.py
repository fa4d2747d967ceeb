"""Tensors of a GGUF file under their Hugging Face names, dequantized to float32."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.models.config import ModelConfig
from jkv.models.fingerprint import StoredTensor, fingerprint
from jkv.models.gguf_codes import ENCODINGS, code_rows
from jkv.models.gguf_file import GgufFile, GgufTensor

_PLAIN = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
ROPE_FREQS = "rope_freqs.weight"  # part of the config, not a weight

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma norms what goes into attention and the MLP and what comes out. Its GGUFs hold 1 + weight of a norm.
_GEMMA_BLOCK = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


class GgufSource:
    """A TensorSource over a mapped GGUF; every read dequantizes anew, with the GIL mostly released.

    Raises:
        UnsupportedModelError: a tensor that no supported architecture has.
    """

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._permuted = file.metadata["general.architecture"] == "llama"
        self._tensors = _by_hf_name(file, gemma=config.norm_offset)

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> str:
        return self._tensor(name).type.name

    def read(self, name: str) -> np.ndarray:
        values = self._in_order(name, _dequantized(self._tensor(name), self._file))
        return values - 1 if self._config.norm_offset and name.endswith("norm.weight") else values

    def read_codes(self, name: str) -> np.ndarray:
        """The quantized weight as `code_rows` has it."""
        return self._in_order(name, code_rows(self._tensor(name)))

    def dequantizes(self) -> bool:
        """Whether there are tensors of which neither values nor codes can be had as they are stored."""
        return any(t.type not in ENCODINGS and t.type not in _PLAIN for t in self._tensors.values())

    def fingerprint(self) -> bytes:
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> bytes:
        return fingerprint(
            StoredTensor(name=t.name, shape=t.shape, dtype=t.type.name, data=t.data)
            for t in self._file.tensors.values()
        )

    def _in_order(self, name: str, rows: np.ndarray) -> np.ndarray:
        if self._permuted and ".self_attn.q_proj." in name:
            return unpermute_rows(rows, self._config.num_heads)
        if self._permuted and ".self_attn.k_proj." in name:
            return unpermute_rows(rows, self._config.num_kv_heads)
        return rows

    def _tensor(self, name: str) -> GgufTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise ConfigError(f"the checkpoint {self._file.path} has no tensor {name}") from None


def hf_name(gguf_name: str, *, gemma: bool) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None where no supported architecture has it."""
    if (match := _NAME.fullmatch(gguf_name)) is None:
        return None
    layer, part, suffix = match.groups()
    block = _GEMMA_BLOCK if gemma else _BLOCK
    stem = (_TOP if layer is None else block).get(part)
    if stem is None:
        return None
    return f"{stem}.{suffix}" if layer is None else f"model.layers.{layer}.{stem}.{suffix}"


def unpermute_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of the rows of q and k (weights `[heads * head_dim, in]` or biases).

    Its rotary embedding pairs neighbouring rows `2i, 2i + 1` of a head; Hugging Face's pairs `i` with
    `i + head_dim / 2`.
    """
    pairs = values.shape[0] // heads // 2
    by_pair = values.reshape(heads, pairs, 2, *values.shape[1:])
    return by_pair.swapaxes(1, 2).reshape(values.shape)


def _by_hf_name(file: GgufFile, *, gemma: bool) -> Mapping[str, GgufTensor]:
    result: dict[str, GgufTensor] = {}
    for tensor in file.tensors.values():
        if tensor.name == ROPE_FREQS:
            continue
        name = hf_name(tensor.name, gemma=gemma)
        if name is None:
            raise UnsupportedModelError(f"{file.path} has the tensor {tensor.name}, which jkv does not know")
        result[name] = tensor
    return result


def _dequantized(tensor: GgufTensor, file: GgufFile) -> np.ndarray:
    """float32, of the tensor's shape."""
    if tensor.type is GGMLQuantizationType.F32:
        return tensor.data.view(np.float32).reshape(tensor.shape)
    if tensor.type is GGMLQuantizationType.F16:
        return tensor.data.view(np.float16).reshape(tensor.shape).astype(np.float32)
    try:
        # Quantized rows are a whole number of blocks, and dequantize() works on the last axis.
        rows = tensor.data.reshape(*tensor.shape[:-1], -1)
        return dequantize(rows, tensor.type).reshape(tensor.shape)
    except NotImplementedError:
        raise UnsupportedModelError(
            f"{file.path}: tensor {tensor.name} has the type {tensor.type.name}, which cannot be dequantized"
        ) from None
