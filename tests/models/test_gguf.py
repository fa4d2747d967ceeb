from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.models.config import ModelConfig, RopeConfig
from jkv.models.gguf_config import config_from_file, config_from_gguf
from jkv.models.gguf_file import read_gguf
from jkv.models.gguf_source import GgufSource, unpermute_rows
from jkv.models.hf_config import from_hf
from tests.models.golden import config_json, permute, weights, write_gguf

ARCHITECTURES = {
    "llama3": "llama",
    "llama_mha_tied": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
}
GEMMA2_KEYS = {"gemma2.attention.sliding_window": 32}
GEMMA3_KEYS = {"gemma3.attention.sliding_window": 32, "gemma3.attention.sliding_window_pattern": 3}
KEYS: dict[str, dict[str, Any]] = {"gemma2": GEMMA2_KEYS, "gemma3": GEMMA3_KEYS}


def write(path: Path, name: str, **kwargs: Any) -> ModelConfig:
    config = replace(from_hf(config_json(name)), **kwargs.pop("config", {}))
    kwargs.setdefault("fields", KEYS.get(name))
    write_gguf(path, ARCHITECTURES[name], config, weights(name), **kwargs)
    return config


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_round_trip_gives_the_hugging_face_checkpoint(tmp_path: Path, name: str) -> None:
    path = tmp_path / "tiny.gguf"
    expected = write(path, name)
    file = read_gguf(path)
    config = config_from_file(file)
    assert config == expected
    source, tensors = GgufSource(file, config), weights(name)
    assert source.names() == tuple(sorted(tensors))
    for tensor, values in tensors.items():
        assert source.shape(tensor) == values.shape
        assert source.dtype(tensor) == "F32"
        # Gemma's norms are stored with 1 added, in float32.
        rounding = 2**-24 if name in KEYS and tensor.endswith("norm.weight") else 0
        np.testing.assert_allclose(
            source.read(tensor), values, rtol=0, atol=rounding * (1 + np.abs(values).max())
        )


def test_llama_rows_are_really_permuted_in_the_file(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", "llama3")
    stored = read_gguf(tmp_path / "tiny.gguf").tensors["blk.0.attn_q.weight"]
    values = weights("llama3")["model.layers.0.self_attn.q_proj.weight"]
    assert not np.array_equal(stored.data.view(np.float32).reshape(stored.shape), values)


@given(heads=st.integers(1, 5), pairs=st.integers(1, 8), columns=st.integers(0, 3))
def test_unpermute_undoes_llama_cpp(heads: int, pairs: int, columns: int) -> None:
    shape = (heads * pairs * 2, columns) if columns else (heads * pairs * 2,)
    values = np.arange(np.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(unpermute_rows(permute(values, heads), heads), values)


def test_llama_biases_are_permuted_too(tmp_path: Path) -> None:
    config = replace(from_hf(config_json("llama3")), qkv_bias=True, o_bias=True)
    tensors = weights("llama3")
    for layer in range(config.num_layers):
        for part, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = np.arange(rows, dtype=np.float32)
    write_gguf(tmp_path / "tiny.gguf", "llama", config, tensors)
    file = read_gguf(tmp_path / "tiny.gguf")
    assert config_from_file(file) == config
    source = GgufSource(file, config)
    for name, values in tensors.items():
        np.testing.assert_array_equal(source.read(name), values)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantized_matrices_come_back_close_and_as_float32(tmp_path: Path, kind: str) -> None:
    quantized = gguf.GGMLQuantizationType[kind]
    config = write(tmp_path / "tiny.gguf", "qwen3", quantized=quantized)
    source = GgufSource(read_gguf(tmp_path / "tiny.gguf"), config)
    for name, values in weights("qwen3").items():
        read = source.read(name)
        assert read.dtype == np.float32
        assert source.dtype(name) == (kind if values.ndim == 2 else "F32")
        step = np.abs(values).max() * (1 / 7 if kind == "Q4_1" else 1 / 100)
        np.testing.assert_allclose(read, values, atol=step)


def test_fingerprints_tell_files_apart(tmp_path: Path) -> None:
    config = write(tmp_path / "a.gguf", "qwen3")
    write(tmp_path / "b.gguf", "qwen3")
    write(tmp_path / "c.gguf", "qwen3", quantized=gguf.GGMLQuantizationType.Q8_0)
    a, b, c = (GgufSource(read_gguf(tmp_path / f"{n}.gguf"), config).fingerprint() for n in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({}, {"kind": "default"}),
        ({"rope.scaling.type": "none"}, {"kind": "default"}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"kind": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"kind": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 256,
            },
            {"kind": "yarn", "factor": 4.0, "original_max_position": 256},
        ),
    ],
)
def test_rope_scaling_keys(tmp_path: Path, fields: dict[str, Any], rope: dict[str, Any]) -> None:
    write(tmp_path / "tiny.gguf", "qwen2", fields={f"qwen2.{key}": value for key, value in fields.items()})
    assert config_from_gguf(tmp_path / "tiny.gguf").rope == RopeConfig(theta=1e6, **rope)


@pytest.mark.parametrize(("original", "factor"), [(8192, 8.0), (8192, 32.0), (4096, 2.0)])
def test_llama3_factors_are_recognised(tmp_path: Path, original: int, factor: float) -> None:
    rope = RopeConfig(theta=5e5, kind="llama3", factor=factor, original_max_position=original)
    config = write(tmp_path / "tiny.gguf", "llama3", config={"rope": rope, "max_position": 32768})
    assert config_from_gguf(tmp_path / "tiny.gguf") == config


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    rope = RopeConfig(theta=5e5, kind="llama3", factor=8.0, high_freq_factor=16.0, original_max_position=8192)
    write(tmp_path / "tiny.gguf", "llama3", config={"rope": rope})
    with pytest.raises(UnsupportedModelError, match="not a Llama 3 scaling"):
        config_from_gguf(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"qwen2.expert_count": 8}, "qwen2.expert_count=8"),
        ({"qwen2.rope.dimension_count": 8}, "qwen2.rope.dimension_count=8"),
        ({"qwen2.rope.scaling.type": "longrope"}, "qwen2.rope.scaling.type='longrope'"),
        ({"qwen2.attention.sliding_window": 32}, "qwen2.attention.sliding_window=32"),
        ({"qwen2.logit_scale": 0.5}, "qwen2.logit_scale=0.5"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_keys_that_jkv_does_not_implement_are_refused(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    write(tmp_path / "tiny.gguf", "qwen2", fields=fields)
    with pytest.raises(UnsupportedModelError) as error:
        config_from_gguf(tmp_path / "tiny.gguf")
    assert named in str(error.value)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "gemma", from_hf(config_json("qwen2")), {})
    with pytest.raises(UnsupportedModelError, match="architecture='gemma'"):
        config_from_gguf(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("gemma2", {}, {"windows": (4096, None, 4096), "attention_soft_cap": 50.0, "final_soft_cap": 30.0}),
        (
            "gemma2",
            {**GEMMA2_KEYS, "gemma2.attn_logit_softcapping": 40.0, "gemma2.final_logit_softcapping": 20.0},
            {"windows": (32, None, 32), "attention_soft_cap": 40.0, "final_soft_cap": 20.0},
        ),
        (
            "gemma3",
            {"gemma3.attention.sliding_window": 32},
            {"windows": (32, 32, 32), "final_soft_cap": None},
        ),
        (
            "gemma3",
            {
                **GEMMA3_KEYS,
                "gemma3.rope.scaling.type": "linear",
                "gemma3.rope.scaling.factor": 8.0,
                "gemma3.rope.freq_base_swa": 2e4,
                "gemma3.final_logit_softcapping": 25.0,
            },
            {
                "rope": RopeConfig(theta=1e6, kind="linear", factor=8.0),
                "local_rope": RopeConfig(theta=2e4),
                "final_soft_cap": 25.0,
            },
        ),
    ],
)
def test_gemma_keys(tmp_path: Path, name: str, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    config = write(tmp_path / "tiny.gguf", name, fields=fields)
    assert config_from_gguf(tmp_path / "tiny.gguf") == replace(config, **expected)


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_attention_otherwise(tmp_path: Path, name: str, layers: int) -> None:
    large = {"num_layers": layers, "hidden_size": 4608 // 32 * 4}
    write(tmp_path / "tiny.gguf", name, config=large)
    assert config_from_gguf(tmp_path / "tiny.gguf").attention_scale == 144**-0.5


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "gemma3.attention.sliding_window=None"),
        ({**GEMMA3_KEYS, "gemma3.attention.sliding_window_pattern": [True, False]}, "=[True, False]"),
    ],
)
def test_gemma_keys_that_cannot_be_right_are_named(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    write(tmp_path / "tiny.gguf", "gemma3", fields=fields)
    with pytest.raises(ConfigError) as error:
        config_from_gguf(tmp_path / "tiny.gguf")
    assert named in str(error.value)


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    config = write(tmp_path / "tiny.gguf", "qwen2")
    file = read_gguf(tmp_path / "tiny.gguf")
    extra = replace(file.tensors["output_norm.weight"], name="blk.0.attn_sinks.weight")
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_sinks\.weight"):
        GgufSource(replace(file, tensors={**file.tensors, extra.name: extra}), config)


@pytest.mark.parametrize("keep", [0, 3, 30, 200, -4096])
def test_a_cut_or_foreign_file_is_a_clear_error(tmp_path: Path, keep: int) -> None:
    write(tmp_path / "tiny.gguf", "qwen2")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:keep])
    with pytest.raises(ConfigError, match=r"cut\.gguf"):
        read_gguf(tmp_path / "cut.gguf")
    (tmp_path / "cut.gguf").write_bytes(b"PK" + whole[2:])
    with pytest.raises(ConfigError, match=r"cut\.gguf is not a readable GGUF"):
        read_gguf(tmp_path / "cut.gguf")


def test_metadata_comes_back_as_python_values(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "meta.gguf", "llama")
    writer.add_array("words", ["a", "é", ""])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_bool("flag", True)
    writer.add_float32("half", 0.5)
    writer.add_uint64("big", 2**40)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_gguf(tmp_path / "meta.gguf").metadata
    assert metadata["words"] == ["a", "é", ""]
    assert metadata["numbers"] == [1, -2, 3]
    assert (metadata["flag"], metadata["half"], metadata["big"]) == (True, 0.5, 2**40)
