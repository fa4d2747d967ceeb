"""The tiny random-weight checkpoints under tests/data, and the same weights as a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from jkv.models.config import ModelConfig

TINY = Path(__file__).parents[1] / "data" / "golden" / "tiny"
LATER_NAMES = ("gemma2", "gemma3", "mixtral", "qwen3_moe", "qwen3_moe_fused")
NAMES = (
    "llama3",
    "llama_mha_tied",
    "llama_wide_heads",
    "qwen2",
    "qwen3",
    "mistral_window",
    *LATER_NAMES,
)

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_GGUF_NAMES = _GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def config_json(name: str, dialect: str = "config.json") -> dict[str, Any]:
    return json.loads((TINY / name / dialect).read_text())


def weights(name: str) -> dict[str, np.ndarray]:
    return load_file(str(TINY / name / "model.safetensors"))


def gguf_name(hf_name: str, arch: str) -> str:
    names = _GEMMA_GGUF_NAMES if arch.startswith("gemma") else _GGUF_NAMES
    stem, suffix = hf_name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{names[stem]}.{suffix}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{names[part]}.{suffix}"


def permute(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k: row `i` and row `i + head_dim / 2` of each head become neighbours."""
    size = values.shape[0] // heads
    head = [i + half for i in range(size // 2) for half in (0, size // 2)]
    return values[[h * size + i for h in range(heads) for i in head]]


def write_gguf(
    path: Path,
    arch: str,
    config: ModelConfig,
    tensors: dict[str, np.ndarray],
    *,
    quantized: gguf.GGMLQuantizationType | None = None,
    fields: dict[str, Any] | None = None,
) -> None:
    """A GGUF as llama.cpp lays it out; `quantized` applies to the matrices, `fields` adds metadata."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (fields or {}).items():
        _add_field(writer, key, value)
    if config.rope.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(config))
    for name, values in tensors.items():
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = permute(values, config.num_heads if ".q_proj." in name else config.num_kv_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        stored = gguf_name(name, arch)
        if quantized is not None and values.ndim == 2:
            writer.add_tensor(stored, gguf.quants.quantize(values, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_uint32(key, value)


def _divisors(config: ModelConfig) -> np.ndarray:
    """What llama.cpp divides each frequency by, from the wavelength bands of Llama 3.1, in Python floats."""
    rope, half = config.rope, config.head_dim // 2
    divisors = []
    for i in range(half):
        wavelength = 2 * np.pi * rope.theta ** (i / half)
        turns = rope.original_max_position / wavelength
        if turns > rope.high_freq_factor:
            divisors.append(1.0)
        elif turns < rope.low_freq_factor:
            divisors.append(rope.factor)
        else:
            smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            divisors.append(1 / ((1 - smooth) / rope.factor + smooth))
    return np.array(divisors, np.float32)
