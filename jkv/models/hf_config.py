"""ModelConfig from a Hugging Face `config.json` (and `generation_config.json`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.models.config import ModelConfig, RopeConfig
from jkv.models.hf_fields import Fields
from jkv.models.hf_neutral import NEUTRAL
from jkv.models.hf_rope import rope_from_hf

_COMMON = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_LLAMA = _COMMON | {
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
}
_MISTRAL = _COMMON | {
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 4096,
}
_QWEN2 = _COMMON | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


@dataclass(frozen=True, kw_only=True)
class _Family:
    """An architecture's constants, and what transformers' config class takes where a field is absent.

    `qkv_bias` is fixed by the architecture unless `reads_attention_bias`, whose field covers q, k, v and o.
    """

    defaults: Mapping[str, Any]
    qkv_bias: bool = False
    qk_norm: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    windows: Literal["none", "every layer", "layer types"] = "none"


FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(defaults=_LLAMA, reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": _Family(defaults=_MISTRAL, windows="every layer"),
    "Qwen2ForCausalLM": _Family(defaults=_QWEN2, qkv_bias=True, windows="layer types"),
    "Qwen3ForCausalLM": _Family(
        defaults=_QWEN2 | {"head_dim": 128, "attention_bias": False},
        qk_norm=True,
        reads_attention_bias=True,
        windows="layer types",
    ),
}

_MLA_FIELDS = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim")
_LINEAR_ATTENTION_FIELDS = ("linear_num_key_heads", "state_size", "ssm_cfg", "mamba_d_state")


def from_hf(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
    """Translate a config in either dialect; fields that are absent take transformers' defaults.

    `max_position` is `max_position_embeddings`, or `factor * original_max_position` under yarn if more:
    Qwen has its users add yarn to the config without raising `max_position_embeddings`.

    Args:
        generation_config: its `eos_token_id` adds to the config's.

    Raises:
        UnsupportedModelError: an architecture or field that jkv does not implement, named.
        ConfigError: a field whose value cannot be right.
    """
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    fields = Fields(config, family.defaults)
    _refuse_unimplemented(fields)
    heads = fields.positive_int("num_attention_heads")
    hidden_size = fields.positive_int("hidden_size")
    layers = fields.positive_int("num_hidden_layers")
    kv_heads = fields.optional_positive_int("num_key_value_heads") or heads
    max_position = fields.positive_int("max_position_embeddings")
    rope = rope_from_hf(fields, max_position)
    attention_bias = family.reads_attention_bias and fields.flag("attention_bias")
    result = ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(fields, hidden_size, heads),
        max_position=_usable_positions(max_position, rope),
        rms_norm_eps=fields.positive_float("rms_norm_eps"),
        rope=rope,
        windows=_windows(fields, family, layers),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and fields.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(fields, generation_config),
    )
    fields.refuse_unread(NEUTRAL)
    check_heads(result)
    return result


def check_heads(config: ModelConfig) -> None:
    """Raise ConfigError where the head counts or the head size cannot make an attention layer."""
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"num_attention_heads={config.num_heads}: it must be a multiple of "
            f"num_key_value_heads={config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ConfigError(f"head_dim={config.head_dim}: rotary embeddings need an even head size")


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise ConfigError(f"config field architectures={named!r}: it must list exactly one architecture")
    if named[0] not in FAMILIES:
        raise UnsupportedModelError(
            f"architecture {named[0]} is not supported{_why(config)}: jkv runs {', '.join(FAMILIES)}"
        )
    return named[0]


def _why(config: Mapping[str, Any]) -> str:
    """The reason to give for an unknown architecture where its config shows it."""
    if any(config.get(name) is not None for name in _MLA_FIELDS):
        return " (multi-head latent attention, MLA, is out of scope)"
    if any(name in config for name in _LINEAR_ATTENTION_FIELDS):
        return " (linear-attention and state-space models are out of scope)"
    if any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return " (mixture of experts)"
    if "vision_config" in config or "audio_config" in config:
        return " (images and audio are out of scope)"
    return ""


def _refuse_unimplemented(fields: Fields) -> None:
    fields.require("hidden_act", ("silu",))
    fields.require("partial_rotary_factor", (1.0,))
    fields.require("pretraining_tp", (1,))
    if (quantization := fields.get("quantization_config")) is not None:
        raise UnsupportedModelError(
            f"config field quantization_config={quantization!r} is not supported: "
            "use the unquantized checkpoint or a GGUF"
        )


def _head_dim(fields: Fields, hidden_size: int, heads: int) -> int:
    if (given := fields.optional_positive_int("head_dim")) is not None:
        return given
    if hidden_size % heads:
        raise ConfigError(
            f"config field hidden_size={hidden_size}: without head_dim it must be a multiple of "
            f"num_attention_heads={heads}"
        )
    return hidden_size // heads


def _usable_positions(max_position: int, rope: RopeConfig) -> int:
    if rope.kind != "yarn":
        return max_position
    return max(max_position, int(rope.factor * rope.original_max_position))


def _windows(fields: Fields, family: _Family, layers: int) -> tuple[int | None, ...]:
    if family.windows == "none":
        return (None,) * layers
    window = fields.optional_positive_int("sliding_window")
    if family.windows == "every layer":
        return (window,) * layers
    first = fields.get("max_window_layers")
    types = fields.get("layer_types")
    if not fields.flag("use_sliding_window"):
        window = None
    if types is None:
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ConfigError(f"config field max_window_layers={first!r}: it must be a layer count from 0")
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise ConfigError(
            f"config field layer_types={types!r}: it must list num_hidden_layers={layers} types"
        )
    for kind in types:
        if kind not in ("sliding_attention", "full_attention"):
            raise UnsupportedModelError(
                f"config field layer_types has {kind!r}: jkv implements full_attention and sliding_attention"
            )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _eos_token_ids(fields: Fields, generation_config: Mapping[str, Any] | None) -> tuple[int, ...]:
    ids = fields.token_ids("eos_token_id")
    if generation_config is not None:
        ids += Fields(generation_config, {}, "generation_config.").token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))
