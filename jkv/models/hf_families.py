"""Architectures of Hugging Face configs that jkv runs: what each one brings, and its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
_MIXTRAL = _MISTRAL | {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}
_QWEN3_MOE = _COMMON | {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "use_sliding_window": False,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_local_experts": 128,
    "norm_topk_prob": False,
}
_GEMMA2 = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = _GEMMA2 | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
# For losses and noise while training, and for what transformers returns beside the logits.
_ROUTER_TRAINING = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})


@dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture's constants, and what transformers' config class takes where a field is absent.

    `qkv_bias` is fixed by the architecture unless `reads_attention_bias`, whose field covers q, k, v and o.
    `windows` says which layers have `sliding_window` (see jkv.models.hf_windows). `gemma` stands for its
    norms, activation, scales and soft caps. `neutral` fields cannot change the logits of this architecture.
    """

    defaults: Mapping[str, Any]
    qkv_bias: bool = False
    qk_norm: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    windows: Literal["none", "every layer", "qwen", "every second", "pattern"] = "none"
    experts: Literal["none", "mixtral", "qwen"] = "none"
    gemma: bool = False
    local_rope: bool = False
    neutral: frozenset[str] = frozenset()


_GEMMA3_FAMILY = Family(
    defaults=_GEMMA3,
    qk_norm=True,
    reads_attention_bias=True,
    windows="pattern",
    gemma=True,
    local_rope=True,
    neutral=frozenset({"cache_implementation"}),
)

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(defaults=_LLAMA, reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Family(defaults=_MISTRAL, windows="every layer"),
    "Qwen2ForCausalLM": Family(defaults=_QWEN2, qkv_bias=True, windows="qwen"),
    "Qwen3ForCausalLM": Family(
        defaults=_QWEN2 | {"head_dim": 128, "attention_bias": False},
        qk_norm=True,
        reads_attention_bias=True,
        windows="qwen",
    ),
    "Qwen3MoeForCausalLM": Family(
        defaults=_QWEN3_MOE,
        qk_norm=True,
        reads_attention_bias=True,
        experts="qwen",
        neutral=_ROUTER_TRAINING | {"sliding_window", "max_window_layers"},  # no window: see hf_experts
    ),
    "MixtralForCausalLM": Family(
        defaults=_MIXTRAL,
        windows="every layer",
        experts="mixtral",
        neutral=_ROUTER_TRAINING,
    ),
    "Gemma2ForCausalLM": Family(
        defaults=_GEMMA2,
        reads_attention_bias=True,
        windows="every second",
        gemma=True,
        neutral=frozenset({"cache_implementation"}),
    ),
    "Gemma3ForCausalLM": _GEMMA3_FAMILY,
    "Gemma3ForConditionalGeneration": _GEMMA3_FAMILY,
}
