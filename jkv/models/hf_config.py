"""ModelConfig from a Hugging Face `config.json` (and `generation_config.json`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.models.config import ModelConfig, RopeConfig
from jkv.models.hf_experts import experts_from_hf
from jkv.models.hf_families import FAMILIES, Family
from jkv.models.hf_fields import Fields
from jkv.models.hf_neutral import NEUTRAL
from jkv.models.hf_rope import rope_from_hf, ropes_by_layer_type
from jkv.models.hf_text import text_config
from jkv.models.hf_windows import windows_from_hf

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
    fields = Fields(text_config(config), family.defaults)
    _refuse_unimplemented(fields, family)
    heads = fields.positive_int("num_attention_heads")
    hidden_size = fields.positive_int("hidden_size")
    layers = fields.positive_int("num_hidden_layers")
    kv_heads = fields.optional_positive_int("num_key_value_heads") or heads
    max_position = fields.positive_int("max_position_embeddings")
    if family.local_rope:
        rope, local_rope = ropes_by_layer_type(fields, max_position)
    else:
        rope, local_rope = rope_from_hf(fields, max_position), None
    attention_bias = family.reads_attention_bias and fields.flag("attention_bias")
    intermediate_size, experts = experts_from_hf(fields, family)
    result = ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(fields, hidden_size, heads),
        max_position=_usable_positions(max_position, rope),
        rms_norm_eps=fields.positive_float("rms_norm_eps"),
        rope=rope,
        local_rope=local_rope,
        windows=windows_from_hf(fields, family, layers),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and fields.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        experts=experts,
        **(_gemma(fields, family) if family.gemma else {}),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(fields, generation_config),
    )
    fields.refuse_unread(NEUTRAL | family.neutral)
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
        return " (another kind of mixture of experts)"
    if "vision_config" in config or "audio_config" in config:
        return " (images and audio are out of scope)"
    return ""


def _refuse_unimplemented(fields: Fields, family: Family) -> None:
    fields.require("hidden_act", ("gelu_pytorch_tanh",) if family.gemma else ("silu",))
    fields.require("partial_rotary_factor", (1.0,))
    fields.require("pretraining_tp", (1,))
    if (quantization := fields.get("quantization_config")) is not None:
        raise UnsupportedModelError(
            f"config field quantization_config={quantization!r} is not supported: "
            "use the unquantized checkpoint or a GGUF"
        )


def _gemma(fields: Fields, family: Family) -> dict[str, Any]:
    fields.require("hidden_activation", ("gelu_pytorch_tanh",))
    if family.local_rope:
        fields.require("attn_logit_softcapping", (None,))  # transformers' Gemma 3 would ignore it
    return {
        "activation": "gelu_tanh",
        "norm_offset": True,
        "output_norms": True,
        "scale_embeddings": True,
        "attention_scale": fields.positive_float("query_pre_attn_scalar") ** -0.5,
        "attention_soft_cap": fields.optional_positive_float("attn_logit_softcapping"),
        "final_soft_cap": fields.optional_positive_float("final_logit_softcapping"),
    }


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


def _eos_token_ids(fields: Fields, generation_config: Mapping[str, Any] | None) -> tuple[int, ...]:
    ids = fields.token_ids("eos_token_id")
    if generation_config is not None:
        ids += Fields(generation_config, {}, "generation_config.").token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))
