from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.models.safetensors_source import INDEX, SafetensorsSource
from tests.models.golden import TINY, weights


def write_shards(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, str(directory / shard))
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_one_file_reads_back_bit_equal() -> None:
    source, expected = SafetensorsSource(TINY / "llama3"), weights("llama3")
    assert source.names() == tuple(sorted(expected))
    for name, values in expected.items():
        assert source.shape(name) == values.shape
        assert source.dtype(name) == "float32"
        np.testing.assert_array_equal(source.read(name), values)


def test_shards_are_the_same_checkpoint(tmp_path: Path) -> None:
    write_shards(tmp_path, weights("qwen2"))
    sharded, single = SafetensorsSource(tmp_path), SafetensorsSource(TINY / "qwen2")
    assert sharded.names() == single.names()
    for name in single.names():
        np.testing.assert_array_equal(sharded.read(name), single.read(name))
    assert sharded.fingerprint() == single.fingerprint()


def test_sixteen_bit_types_keep_their_type(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    save_file(
        {
            "a": values.astype(ml_dtypes.bfloat16),
            "b": values.astype(np.float16),
            "c": values.astype(np.int32),
        },
        str(tmp_path / "model.safetensors"),
    )
    source = SafetensorsSource(tmp_path)
    assert [source.dtype(name) for name in source.names()] == ["bfloat16", "float16", "I32"]
    assert source.read("a").dtype == ml_dtypes.bfloat16
    assert source.read("b").dtype == np.float16
    with pytest.raises(UnsupportedModelError, match=r"tensor c .* stored as I32"):
        source.read("c")


def test_one_changed_weight_changes_the_fingerprint(tmp_path: Path) -> None:
    tensors = weights("llama3")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].copy()
    tensors["model.norm.weight"][3] += 1e-3
    save_file(tensors, str(tmp_path / "model.safetensors"))
    assert SafetensorsSource(tmp_path).fingerprint() != SafetensorsSource(TINY / "llama3").fingerprint()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, weights("llama3"))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"missing: b\.safetensors"):
        SafetensorsSource(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, weights("llama3"))
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = "a.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"tensor model\.extra\.weight in a\.safetensors"):
        SafetensorsSource(tmp_path)


def test_damage_and_absence_are_clear(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds neither"):
        SafetensorsSource(tmp_path)
    whole = (TINY / "llama3" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a readable"):
        SafetensorsSource(tmp_path)
    with pytest.raises(ConfigError, match="no tensor nope"):
        SafetensorsSource(TINY / "llama3").read("nope")
