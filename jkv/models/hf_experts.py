"""Mixtures of experts from a Hugging Face config."""

from __future__ import annotations

from jkv.errors import ConfigError
from jkv.models.config import ExpertsConfig
from jkv.models.hf_families import Family
from jkv.models.hf_fields import Fields


def experts_from_hf(fields: Fields, family: Family) -> tuple[int, ExpertsConfig | None]:
    """The width of the MLP or of each expert, and the mixture where the family has one.

    Mixtral's softmax over the chosen experts is one over all of them with normalized weights.

    Raises:
        UnsupportedModelError: layers without experts among those with them, or Qwen3-MoE with windows.
        ConfigError: a field that cannot be right.
    """
    width = fields.positive_int("intermediate_size")
    if family.experts == "none":
        return width, None
    normalized = True
    if family.experts == "qwen":
        fields.require("decoder_sparse_step", (1,))
        fields.require("mlp_only_layers", ([],))
        fields.require("use_sliding_window", (False,))
        width = fields.positive_int("moe_intermediate_size")
        normalized = fields.flag("norm_topk_prob")
    count_name = fields.either("num_local_experts", "num_experts")
    count, per_token = fields.positive_int(count_name), fields.positive_int("num_experts_per_tok")
    if per_token > count:
        raise ConfigError(
            f"config field num_experts_per_tok={per_token}: it must be at most {count_name}={count}"
        )
    return width, ExpertsConfig(count=count, per_token=per_token, normalized=normalized)
