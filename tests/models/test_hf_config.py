from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.models.config import ExpertsConfig, RopeConfig
from jkv.models.hf_config import from_hf
from tests.models.golden import NAMES, config_json

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 4}
QWEN3_MOE: dict[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 4}
MIXTRAL: dict[str, Any] = {"architectures": ["MixtralForCausalLM"], "num_hidden_layers": 4}
GEMMA2: dict[str, Any] = {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 4}
GEMMA3: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 4}


@pytest.mark.parametrize("name", NAMES)
def test_both_dialects_give_the_same_config(name: str) -> None:
    new, old = config_json(name), config_json(name, "config.hub.json")
    assert "rope_parameters" in new
    assert "rope_parameters" not in old
    assert from_hf(new) == from_hf(old)


def test_llama3_is_read_in_full() -> None:
    config = from_hf(config_json("llama3"))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 4, 2, 16)
    assert config.rope == RopeConfig(
        theta=500000.0,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=128,
    )
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


@pytest.mark.parametrize(
    ("name", "qkv_bias", "o_bias", "qk_norm", "tied"),
    [
        ("llama_mha_tied", False, False, False, True),
        ("qwen2", True, False, False, True),
        ("qwen3", False, False, True, False),
    ],
)
def test_what_an_architecture_brings(
    name: str, qkv_bias: bool, o_bias: bool, qk_norm: bool, tied: bool
) -> None:
    config = from_hf(config_json(name))
    assert (config.qkv_bias, config.o_bias, config.qk_norm, config.tie_embeddings) == (
        qkv_bias,
        o_bias,
        qk_norm,
        tied,
    )


def test_absent_fields_take_the_defaults_of_transformers() -> None:
    llama = from_hf({"architectures": ["LlamaForCausalLM"]})
    assert (llama.vocab_size, llama.intermediate_size, llama.max_position) == (32000, 11008, 2048)
    assert (llama.num_kv_heads, llama.head_dim, llama.rms_norm_eps) == (32, 128, 1e-6)
    assert (llama.bos_token_id, llama.eos_token_ids) == (1, (2,))
    mistral = from_hf({"architectures": ["MistralForCausalLM"]})
    assert (mistral.num_kv_heads, mistral.windows[0], mistral.max_position) == (8, 4096, 131072)
    qwen3 = from_hf({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024})
    assert (qwen3.head_dim, qwen3.num_kv_heads, qwen3.eos_token_ids) == (128, 32, ())


def test_llama_attention_bias_covers_all_four_projections() -> None:
    config = from_hf({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)


def test_mistral_windows_every_layer_and_null_switches_it_off() -> None:
    base = config_json("mistral_window")
    assert from_hf(base).windows == (48, 48, 48)
    assert from_hf({**base, "sliding_window": None}).windows == (None, None, None)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, (None, None, None, None)),
        ({"sliding_window": 32, "max_window_layers": 1}, (None, None, None, None)),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}, (None, 32, 32, 32)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 32,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (32, None, 32, None),
        ),
    ],
)
def test_qwen_windows(fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert from_hf({**QWEN3, **fields}).windows == windows


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (GEMMA2, (4096, None, 4096, None)),
        (GEMMA2 | {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, (None, None, None, 4096)),
        (GEMMA3 | {"num_hidden_layers": 7}, (4096,) * 5 + (None, 4096)),
        (GEMMA3 | {"sliding_window_pattern": 2, "sliding_window": 512}, (512, None, 512, None)),
        (
            GEMMA3 | {"sliding_window_pattern": 2, "layer_types": ["sliding_attention"] * 4},
            (4096, 4096, 4096, 4096),
        ),
    ],
)
def test_gemma_windows(config: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert from_hf(config).windows == windows


def test_what_gemma_brings() -> None:
    gemma2, gemma3 = from_hf(GEMMA2), from_hf(GEMMA3)
    for config in (gemma2, gemma3):
        assert (config.norm_offset, config.output_norms, config.scale_embeddings) == (True, True, True)
        assert (config.activation, config.tie_embeddings, config.head_dim) == ("gelu_tanh", True, 256)
        assert (config.bos_token_id, config.eos_token_ids) == (2, (1,))
    assert (gemma2.attention_soft_cap, gemma2.final_soft_cap, gemma2.qk_norm) == (50.0, 30.0, False)
    assert (gemma3.attention_soft_cap, gemma3.final_soft_cap, gemma3.qk_norm) == (None, None, True)
    assert (gemma2.rope.theta, gemma2.local_rope) == (1e4, None)
    assert from_hf(GEMMA2 | {"query_pre_attn_scalar": 144}).attention_scale == 1 / 12
    assert from_hf(GEMMA2 | {"attn_logit_softcapping": None}).attention_soft_cap is None


@pytest.mark.parametrize(
    "fields",
    [
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ],
)
def test_gemma3_scales_the_global_rope_only(fields: dict[str, Any]) -> None:
    config = from_hf(GEMMA3 | fields)
    assert config.rope == RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert config.local_rope == RopeConfig(theta=1e4)


def multimodal(**text: Any) -> dict[str, Any]:
    """As Gemma 3 lies on hubs: most fields of the text model at their defaults."""
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "eos_token_id": [1, 106],
        "initializer_range": 0.02,
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 4, **text},
        "vision_config": {"hidden_size": 1152, "vision_use_head": False},
    }


def test_the_text_model_of_a_multimodal_gemma3() -> None:
    config = from_hf(multimodal(sliding_window=1024, rope_scaling={"rope_type": "linear", "factor": 8.0}))
    alone = from_hf(GEMMA3 | {"sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert config.eos_token_ids == (1, 106)
    assert replace(config, architecture=alone.architecture, eos_token_ids=alone.eos_token_ids) == alone


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (GEMMA2 | {"hidden_act": "silu"}, "hidden_act='silu'"),
        (GEMMA2 | {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        (GEMMA2 | {"rope_local_base_freq": 1e4}, "rope_local_base_freq=10000.0"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (
            GEMMA3 | {"rope_parameters": {"full_attention": {}, "sliding_attention": {}, "chunked": {}}},
            "rope_parameters.chunked={}",
        ),
        (multimodal(quantization_config={"bits": 4}), "quantization_config={'bits': 4}"),
        (multimodal() | {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        (multimodal() | {"audio_config": {}}, "audio_config={}"),
        (multimodal(num_kv_shared_layers=2), "num_kv_shared_layers=2"),
    ],
)
def test_what_gemma_may_not_have_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        from_hf(config)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (GEMMA2 | {"sliding_window": None}, "sliding_window=None"),
        (GEMMA2 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        (GEMMA3 | {"sliding_window_pattern": 0}, "sliding_window_pattern=0"),
        (GEMMA3 | {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters.full_attention=None"),
        (multimodal() | {"text_config": None}, "text_config=None"),
        (multimodal(tie_word_embeddings=False) | {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    ],
)
def test_impossible_values_of_gemma_are_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_hf(config)
    assert named in str(error.value)


def test_experts_under_either_name_of_their_number() -> None:
    moe = config_json("qwen3_moe")
    assert from_hf(moe).experts == ExpertsConfig(count=8, per_token=2, normalized=True)
    assert from_hf(moe).intermediate_size == 48
    hub = {name: value for name, value in moe.items() if name != "num_local_experts"}
    assert from_hf(hub | {"num_experts": 8}) == from_hf(moe)
    assert from_hf(moe | {"num_experts": 8, "norm_topk_prob": False}).experts == ExpertsConfig(
        count=8, per_token=2, normalized=False
    )


def test_what_mixtral_brings() -> None:
    config = from_hf(MIXTRAL)
    assert config.experts == ExpertsConfig(count=8, per_token=2, normalized=True)
    assert (config.intermediate_size, config.rms_norm_eps, config.rope.theta) == (14336, 1e-5, 1e6)
    assert (config.windows, config.qk_norm, config.qkv_bias) == ((None,) * 4, False, False)
    assert from_hf(MIXTRAL | {"sliding_window": 4096}).windows == (4096,) * 4
    trained = {"output_router_logits": True, "router_aux_loss_coef": 0.02, "router_jitter_noise": 0.1}
    assert from_hf(MIXTRAL | trained) == config


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (QWEN3_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, "mlp_only_layers=[0]"),
        (QWEN3_MOE | {"use_sliding_window": True}, "use_sliding_window=True"),
        (QWEN3_MOE | {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size=512"),
        (QWEN3_MOE | {"n_shared_experts": 1}, "n_shared_experts=1"),
        (MIXTRAL | {"norm_topk_prob": True}, "norm_topk_prob=True"),
        (MIXTRAL | {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_other_mixtures_are_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        from_hf(config)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (QWEN3_MOE | {"num_experts": 8, "num_local_experts": 16}, "num_local_experts=16 and num_experts=8"),
        (QWEN3_MOE | {"num_experts": 4}, "num_experts_per_tok=8: it must be at most num_experts=4"),
        (QWEN3_MOE | {"norm_topk_prob": 1}, "norm_topk_prob=1"),
        (MIXTRAL | {"num_local_experts": 0}, "num_local_experts=0"),
    ],
)
def test_impossible_mixtures_are_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_hf(config)
    assert named in str(error.value)


def test_generation_config_adds_end_tokens() -> None:
    config = from_hf({**LLAMA, "eos_token_id": [5, 7]}, {"eos_token_id": [7, 9], "temperature": 0.6})
    assert config.eos_token_ids == (5, 7, 9)
    assert from_hf({**LLAMA, "eos_token_id": None}, {"eos_token_id": 3}).eos_token_ids == (3,)


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_hub_scaling_in_both_spellings(spelling: str) -> None:
    config = from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": {spelling: "linear", "factor": 2}})
    assert config.rope == RopeConfig(theta=5e5, kind="linear", factor=2.0)


def test_qwen_yarn_extends_the_usable_positions() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = from_hf({**QWEN3, "max_position_embeddings": 40960, "rope_scaling": scaling})
    assert config.rope == RopeConfig(theta=1e4, kind="yarn", factor=4.0, original_max_position=32768)
    assert config.max_position == 131072


def test_yarn_defaults_follow_the_context() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": None, "original_max_position_embeddings": 1024}
    config = from_hf({**LLAMA, "max_position_embeddings": 4096, "rope_parameters": rope})
    assert (config.rope.factor, config.rope.original_max_position) == (4.0, 1024)
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
        "beta_fast": 16,
        "beta_slow": 2,
    }
    read = from_hf({**LLAMA, "max_position_embeddings": 4096, "rope_parameters": rope}).rope
    assert (read.original_max_position, read.mscale, read.mscale_all_dim, read.truncate) == (
        4096,
        1.0,
        0.5,
        False,
    )
    assert (read.beta_fast, read.beta_slow) == (16.0, 2.0)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 8}, "mixture of experts"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, "MLA"),
        ({"architectures": ["MambaForCausalLM"], "state_size": 16}, "linear-attention"),
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}, "images"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, "mrope_section=[1]"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
        ),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"attention_multiplier": 2.0, "auto_map": {"A": "b"}}, "attention_multiplier=2.0, auto_map="),
    ],
)
def test_what_jkv_does_not_implement_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        from_hf({**LLAMA, **fields})
    assert named in str(error.value)


def test_unsupported_layer_types_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        from_hf({**QWEN3, "layer_types": ["linear_attention"] * 4})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": None}, "architectures=None"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_attention_heads": True}, "num_attention_heads=True"),
        ({"hidden_size": 66}, "hidden_size=66"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"eos_token_id": [2, -1]}, "eos_token_id=[2, -1]"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor=None"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "disagree"),
        ({"rope_scaling": 3}, "rope_scaling=3"),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 1.0,
                }
            },
            "high_freq_factor=1.0",
        ),
    ],
)
def test_impossible_values_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_hf({**LLAMA, **fields})
    assert named in str(error.value)


def test_unknown_fields_may_be_null_or_false_and_neutral_ones_anything() -> None:
    noise = {
        "rope_interleaved": False,
        "auto_map": None,
        "torch_dtype": "bfloat16",
        "initializer_range": 0.04,
    }
    assert from_hf({**LLAMA, **noise}) == from_hf(LLAMA)
