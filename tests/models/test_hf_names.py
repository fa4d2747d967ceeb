from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.models.hf_config import from_hf
from jkv.models.params import load_params
from jkv.models.resolve import Checkpoint, convert, open_checkpoint, resolve_model
from tests.models.golden import config_json, weights

_W = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def as_mixtral(name: str) -> str:
    """The name that Mixtral's checkpoints have for a tensor of Qwen3-MoE's."""
    name = name.replace(".mlp.", ".block_sparse_moe.")
    for ours, theirs in _W.items():
        name = name.replace(ours, theirs)
    return name


def write(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Checkpoint:
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {name: np.ascontiguousarray(values) for name, values in tensors.items()},
        directory / "model.safetensors",
    )
    return open_checkpoint(resolve_model(str(directory)))


def mixtral(directory: Path, extra: dict[str, np.ndarray] | None = None) -> Checkpoint:
    moe = config_json("qwen3_moe")
    ours = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
    config = {name: moe[name] for name in ours | {"rms_norm_eps", "num_experts_per_tok"}}
    config |= {"architectures": ["MixtralForCausalLM"], "intermediate_size": 48, "num_local_experts": 8}
    without_qk_norms = {
        n: v for n, v in weights("qwen3_moe").items() if "_norm." not in n or "self_attn" not in n
    }
    return write(directory, config, {as_mixtral(n): v for n, v in without_qk_norms.items()} | (extra or {}))


def multimodal(directory: Path, prefix: str, image_prefix: str) -> Checkpoint:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": config_json("gemma3"),
        "vision_config": {"hidden_size": 8},
    }
    tensors = {prefix + name.removeprefix("model."): values for name, values in weights("gemma3").items()}
    images = {
        f"{image_prefix}vision_tower.vision_model.post_layernorm.weight": np.ones(8, np.float32),
        f"{image_prefix}multi_modal_projector.mm_soft_emb_norm.weight": np.ones(8, np.float32),
    }
    return write(directory, config, tensors | images)


def test_mixtral_fills_the_parameters_of_its_experts(tmp_path: Path) -> None:
    checkpoint = mixtral(tmp_path)
    tensors = weights("qwen3_moe")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    np.testing.assert_array_equal(checkpoint.source.read(name), tensors[name])
    assert (checkpoint.source.shape(name), checkpoint.source.dtype(name)) == ((64, 48), "float32")
    params = load_params(checkpoint.config, checkpoint.source, "float32", stacked=False, workers=2)
    mlp = params.layers[2]["mlp"]
    np.testing.assert_array_equal(mlp["gate"]["weight"][...], tensors["model.layers.2.mlp.gate.weight"])
    for projection in _W:
        for expert in range(8):
            np.testing.assert_array_equal(
                mlp["experts"][projection]["weight"][...][expert],
                tensors[f"model.layers.2.mlp.experts.{expert}.{projection}.weight"].T,
            )


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.block_sparse_moe.shared.w1.weight", "model.layers.0.mlp.shared_expert.up_proj.weight"],
)
def test_experts_that_all_tokens_share_are_refused(tmp_path: Path, name: str) -> None:
    checkpoint = mixtral(tmp_path, {name: np.ones((4, 4), np.float32)})
    with pytest.raises(UnsupportedModelError, match=f"MixtralForCausalLM has no tensor {name}"):
        load_params(checkpoint.config, checkpoint.source, "float32", stacked=False, workers=1)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = weights("qwen3_moe")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    checkpoint = write(tmp_path, config_json("qwen3_moe"), tensors)
    with pytest.raises(UnsupportedModelError, match=r"tensor model\.layers\.1\.mlp\.experts\.3\.up_proj"):
        load_params(checkpoint.config, checkpoint.source, "float32", stacked=False, workers=1)


@pytest.mark.parametrize(
    ("prefix", "image_prefix"), [("language_model.model.", ""), ("model.language_model.", "model.")]
)
def test_a_multimodal_gemma3_is_its_text_model(
    tmp_path: Path, prefix: str, image_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = multimodal(tmp_path, prefix, image_prefix)
    assert "leaves out the 2 tensors for images" in caplog.text
    tensors = weights("gemma3")
    assert checkpoint.source.names() == tuple(sorted(tensors))
    for name, values in tensors.items():
        np.testing.assert_array_equal(checkpoint.source.read(name), values)
    assert checkpoint.config.local_rope == from_hf(config_json("gemma3")).local_rope
    with pytest.raises(ConfigError, match="no tensor nope"):
        checkpoint.source.read("nope")


def test_a_converted_copy_keeps_the_text_model_only(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    before = multimodal(tmp_path / "model", "language_model.model.", "")
    convert(resolve_model(str(tmp_path / "model")), tmp_path / "out")
    after = open_checkpoint(resolve_model(str(tmp_path / "out")))
    assert after.config == before.config
    assert after.source.names() == before.source.names()
    assert after.source.fingerprint() == before.source.fingerprint()
