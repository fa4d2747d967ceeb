"""ModelConfig from a GGUF's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.models.config import ModelConfig, RopeConfig
from jkv.models.gguf_file import GgufFile, read_gguf
from jkv.models.gguf_gemma import gemma_config
from jkv.models.gguf_keys import Keys
from jkv.models.gguf_source import ROPE_FREQS
from jkv.models.hf_config import check_heads
from jkv.models.rope import inverse_frequencies

# Llama 3's training contexts first; a checkpoint names none, and every one so far is a power of two.
_LLAMA3_CONTEXTS = (8192, *(1 << bits for bits in range(6, 21)))
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")


def config_from_gguf(path: Path) -> ModelConfig:
    """Read a GGUF file's header and translate it; see `config_from_file`."""
    return config_from_file(read_gguf(path))


def config_from_file(file: GgufFile) -> ModelConfig:
    """Translate a GGUF header; biases, the q/k norms and a tied head follow from which tensors there are.

    Raises:
        UnsupportedModelError: an architecture, key or rope scaling that jkv does not implement, named.
        ConfigError: a key that is missing or out of range.
    """
    keys = Keys(file)
    heads, hidden_size = keys.count("attention.head_count"), keys.count("embedding_length")
    key_length = keys.count("attention.key_length", hidden_size // heads)
    layers = keys.count("block_count")
    context = keys.count("context_length")
    rope = _rope(file, keys, key_length, context)
    config = ModelConfig(
        architecture=keys.architecture,
        vocab_size=_embedding(file).shape[0],
        hidden_size=hidden_size,
        intermediate_size=keys.count("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.count("attention.head_count_kv", heads),
        head_dim=key_length,
        max_position=context,
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        windows=(None,) * layers,
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(file.metadata),
    )
    if keys.architecture.startswith("Gemma"):
        config = gemma_config(config, keys)
    keys.require("attention.value_length", (key_length,))
    keys.require("rope.dimension_count", (key_length,))
    keys.require("expert_count", (0,))
    keys.refuse_unread()
    check_heads(config)
    return config


def _embedding(file: GgufFile) -> Any:
    if (tensor := file.tensors.get("token_embd.weight")) is None:
        raise ConfigError(f"{file.path} has no tensor token_embd.weight")
    return tensor


def _eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    ids = (metadata.get(f"tokenizer.ggml.{name}") for name in _END_TOKENS)
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _rope(file: GgufFile, keys: Keys, head_dim: int, context: int) -> RopeConfig:
    plain = RopeConfig(theta=keys.number("rope.freq_base", 10000.0))
    kind = keys.get("rope.scaling.type")
    legacy = keys.number("rope.scale_linear", 1.0)
    if ROPE_FREQS in file.tensors:
        keys.require("rope.scaling.type", ("none",))
        keys.require("rope.scale_linear", (1.0,))
        return _llama3_rope(file, plain, head_dim)
    if kind == "linear" or (kind is None and legacy != 1.0):
        return replace(plain, kind="linear", factor=keys.number("rope.scaling.factor", legacy))
    if kind == "yarn":
        return _yarn_rope(keys, plain, context)
    keys.require("rope.scaling.type", ("none",))
    return plain


def _yarn_rope(keys: Keys, plain: RopeConfig, context: int) -> RopeConfig:
    """llama.cpp scales cos and sin by `attn_factor * (0.1 ln(factor) + 1)`: at 1, transformers' default."""
    keys.require("rope.scaling.attn_factor", (1.0,))
    keys.require("rope.scaling.yarn_attn_factor", (1.0,))
    keys.require("rope.scaling.yarn_ext_factor", (1.0,))
    return replace(
        plain,
        kind="yarn",
        factor=keys.number("rope.scaling.factor"),
        original_max_position=keys.count("rope.scaling.original_context_length", context),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _llama3_rope(file: GgufFile, plain: RopeConfig, head_dim: int) -> RopeConfig:
    """Find the Llama 3 scaling that gives the stored divisors; anything else is refused.

    llama.cpp stores what each frequency is divided by, not the scaling's fields. The largest divisor is
    `factor`; every Llama 3 has a low and high frequency factor of 1 and 4.
    """
    tensor = file.tensors[ROPE_FREQS]
    stored = np.frombuffer(tensor.data.tobytes(), np.float32)
    unscaled, _ = inverse_frequencies(plain, head_dim)
    if stored.shape == unscaled.shape:
        for context in _LLAMA3_CONTEXTS:
            rope = replace(
                plain, kind="llama3", factor=float(str(stored.max())), original_max_position=context
            )
            scaled, _ = inverse_frequencies(rope, head_dim)
            if np.allclose(unscaled / scaled, stored, rtol=1e-5, atol=0):
                return rope
    raise UnsupportedModelError(
        f"{file.path}: {ROPE_FREQS} {stored.tolist()} is not a Llama 3 scaling "
        "with frequency factors of 1 and 4"
    )
