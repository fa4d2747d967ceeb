from __future__ import annotations

import json
import shutil
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jkv import convert as command
from jkv.errors import ConfigError
from jkv.models.hf_config import from_hf
from jkv.models.orbax_convert import convert
from jkv.models.orbax_metadata import read_metadata
from jkv.models.orbax_source import OrbaxSource
from jkv.models.resolve import open_checkpoint, resolve_model
from jkv.models.safetensors_source import SafetensorsSource
from tests.models.golden import NAMES, TINY, config_json, weights


def convert_tiny(out: Path, name: str = "llama3", dtype: str | None = None) -> None:
    convert(SafetensorsSource(TINY / name), from_hf(config_json(name)), out, dtype=dtype)


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_is_bit_equal_and_keeps_config_and_fingerprint(tmp_path: Path, name: str) -> None:
    convert_tiny(tmp_path / "out", name)
    original, expected = SafetensorsSource(TINY / name), weights(name)
    source = OrbaxSource(tmp_path / "out")
    assert read_metadata(tmp_path / "out").config == from_hf(config_json(name))
    assert source.fingerprint() == original.fingerprint()
    assert source.names() == original.names()
    with ThreadPoolExecutor(4) as pool:
        for tensor, values in zip(source.names(), pool.map(source.read, source.names()), strict=True):
            assert (values.dtype, source.dtype(tensor)) == (np.float32, "float32")
            assert source.shape(tensor) == values.shape
            np.testing.assert_array_equal(values, expected[tensor])


def test_rounding_to_bfloat16_changes_the_fingerprint(tmp_path: Path) -> None:
    convert_tiny(tmp_path / "out", dtype="bfloat16")
    source = OrbaxSource(tmp_path / "out")
    for name, values in weights("llama3").items():
        assert source.dtype(name) == "bfloat16"
        np.testing.assert_array_equal(source.read(name), values.astype(ml_dtypes.bfloat16))
    assert source.fingerprint() != SafetensorsSource(TINY / "llama3").fingerprint()


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_widening_or_keeping_bfloat16_keeps_the_fingerprint(tmp_path: Path, dtype: str | None) -> None:
    tensors = {name: values.astype(ml_dtypes.bfloat16) for name, values in weights("llama3").items()}
    save_file(tensors, str(tmp_path / "model.safetensors"))
    original = SafetensorsSource(tmp_path)
    convert(original, from_hf(config_json("llama3")), tmp_path / "out", dtype=dtype)
    source = OrbaxSource(tmp_path / "out")
    assert source.fingerprint() == original.fingerprint()
    for name, values in tensors.items():
        assert source.dtype(name) == (dtype or "bfloat16")
        np.testing.assert_array_equal(source.read(name).astype(np.float32), values.astype(np.float32))


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="No space left"):
        convert(
            SafetensorsSource(TINY / "llama3"),
            from_hf(config_json("llama3")),
            tmp_path / "out",
            save_tokenizer=fail,
        )
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match="it needs up to 1 MB and 0 MB are free"):
        convert_tiny(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="already exists"):
        convert_tiny(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_damage_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"jkv\.json cannot be read"):
        OrbaxSource(tmp_path)
    convert_tiny(tmp_path / "out")
    source = OrbaxSource(tmp_path / "out")
    with pytest.raises(ConfigError, match="no tensor nope"):
        source.read("nope")
    metadata = json.loads((tmp_path / "out" / "jkv.json").read_text())
    metadata["tensors"]["model.norm.weight"] = [[63], "float32"]
    (tmp_path / "out" / "jkv.json").write_text(json.dumps(metadata))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is float32 \(64,\)"):
        OrbaxSource(tmp_path / "out").read("model.norm.weight")
    (tmp_path / "out" / "weights" / "model.norm.weight" / ".zarray").unlink()
    with pytest.raises(ConfigError, match="cannot be restored"):
        OrbaxSource(tmp_path / "out").read("model.norm.weight")
    (tmp_path / "out" / "jkv.json").write_text(json.dumps({**metadata, "format": 2}))
    with pytest.raises(ConfigError, match="format=2: this jkv reads 1"):
        OrbaxSource(tmp_path / "out")


def test_the_command_converts_a_directory_with_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_bytes((TINY / "qwen3" / name).read_bytes())
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert command.main(["--model", str(model), "--out", str(out), "--dtype", "float32"]) == 0
    files = resolve_model(str(out))
    assert (files.kind, files.tokenizer) == ("orbax", out)
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert open_checkpoint(files).config == from_hf(config_json("qwen3"))
    assert command.main(["--model", str(model), "--out", str(out)]) == 2
    assert "error:" in capsys.readouterr().err
