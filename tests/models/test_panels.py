"""Weights in panels have exactly the values that the checkpoint is read to have."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import save_file

from jkv.kernels.cpu_product import Encoding, PanelWeight
from jkv.models.gguf_file import read_gguf
from jkv.models.gguf_source import GgufSource
from jkv.models.hf_config import from_hf
from jkv.models.panels import read_panels, stored_encoding
from jkv.models.params import panel_encodings
from jkv.models.safetensors_source import SafetensorsSource
from jkv.models.source import TensorSource
from tests.models.golden import config_json, weights, write_gguf

_Q_PROJ = "model.layers.0.self_attn.q_proj.weight"  # whose rows llama.cpp permutes
_DOWN_PROJ = "model.layers.0.mlp.down_proj.weight"


def _values(weight: PanelWeight) -> np.ndarray:
    on_device = PanelWeight(words=jnp.asarray(weight.words), outputs=weight.outputs, encoding=weight.encoding)
    return np.asarray(on_device.rows(jnp.arange(weight.outputs)))


def _check(source: TensorSource, name: str, encoding: Encoding) -> None:
    values = source.read(name)
    assert stored_encoding(source, name, values.shape[1]) == encoding
    weight = read_panels(source, name, encoding)
    assert PanelWeight.abstract(values.shape, encoding).words.shape == weight.words.shape
    np.testing.assert_array_equal(_values(weight), values.astype(np.float32))


@pytest.mark.parametrize(
    ("kind", "encoding"),
    [("Q4_0", "int4"), ("Q4_1", "int4"), ("Q8_0", "int8"), ("BF16", "bfloat16"), ("F16", "float32")],
)
def test_of_gguf(tmp_path: Path, kind: str, encoding: Encoding) -> None:
    config = from_hf(config_json("llama3"))
    write_gguf(
        tmp_path / "tiny.gguf", "llama", config, weights("llama3"), quantized=GGMLQuantizationType[kind]
    )
    source = GgufSource(read_gguf(tmp_path / "tiny.gguf"), config)
    for name in (_Q_PROJ, _DOWN_PROJ):
        _check(source, name, encoding)
    assert not source.dequantizes()


@pytest.mark.parametrize(
    ("dtype", "encoding"), [("float32", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16")]
)
def test_of_safetensors(tmp_path: Path, dtype: str, encoding: Encoding) -> None:
    stored = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    tensors = {name: weights("llama3")[name].astype(stored) for name in (_Q_PROJ, _DOWN_PROJ)}
    save_file(tensors, str(tmp_path / "model.safetensors"))
    for name in tensors:
        _check(SafetensorsSource(tmp_path), name, encoding)


def test_codes_that_do_not_fill_a_word_are_stored_wider(tmp_path: Path) -> None:
    save_file({"w": np.ones((4, 33), ml_dtypes.bfloat16)}, str(tmp_path / "model.safetensors"))
    assert stored_encoding(SafetensorsSource(tmp_path), "w", 33) == "float32"


def test_a_gguf_of_other_types_is_dequantized(tmp_path: Path) -> None:
    config = from_hf(config_json("llama3"))
    write_gguf(
        tmp_path / "tiny.gguf", "llama", config, weights("llama3"), quantized=GGMLQuantizationType.Q5_0
    )
    source = GgufSource(read_gguf(tmp_path / "tiny.gguf"), config)
    assert source.dequantizes()
    _check(source, _DOWN_PROJ, "float32")


@pytest.mark.parametrize(
    ("name", "tied"), [("llama_mha_tied", True), ("llama3", False), ("qwen3_moe", False)]
)
def test_every_weight_of_a_product_but_experts(name: str, tied: bool) -> None:
    config = from_hf(config_json(name))
    assert config.tie_embeddings == tied
    encodings = panel_encodings(config, None)
    linear = {
        n for n in weights(name) if n.endswith(("_proj.weight", "mlp.gate.weight")) and ".experts." not in n
    }
    assert set(encodings) == linear | {"model.embed_tokens.weight" if tied else "lm_head.weight"}
    assert set(encodings.values()) == {"float32"}
