from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from gguf import GGMLQuantizationType, TokenType
from tokenizers.pre_tokenizers import ByteLevel

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.models import orbax_convert
from jkv.models.hf_config import from_hf
from jkv.models.resolve import ModelFiles, cached_orbax, convert, model_config, open_checkpoint, resolve_model
from jkv.text.tokenizer import Tokenizer
from tests.models.golden import TINY, config_json, weights, write_gguf


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JKV_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> ModelFiles:
    write_gguf(tmp_path / "tiny.gguf", "llama", from_hf(config_json("llama3")), weights("llama3"))
    return resolve_model(str(tmp_path / "tiny.gguf"))


def test_a_directory_with_safetensors(tmp_path: Path) -> None:
    files = resolve_model(str(TINY / "qwen2"))
    assert files == ModelFiles(kind="safetensors", path=TINY / "qwen2", tokenizer=None, name="qwen2")
    checkpoint = open_checkpoint(files)
    assert checkpoint.config == from_hf(config_json("qwen2"))
    assert checkpoint.source.names() == tuple(sorted(weights("qwen2")))


def test_tokenizer_and_generation_config_are_found(tmp_path: Path) -> None:
    shutil.copytree(TINY / "qwen2", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    files = resolve_model(str(tmp_path / "model"))
    assert files.tokenizer == tmp_path / "model"
    assert open_checkpoint(files).config.eos_token_ids == (2, 9)


def test_a_gguf_file(tiny_gguf: ModelFiles) -> None:
    assert (tiny_gguf.kind, tiny_gguf.name, tiny_gguf.tokenizer) == ("gguf", "tiny", tiny_gguf.path)
    checkpoint = open_checkpoint(tiny_gguf)
    assert checkpoint.config == from_hf(config_json("llama3"))
    for name, values in weights("llama3").items():
        np.testing.assert_array_equal(checkpoint.source.read(name), values)


def test_a_config_is_read_without_weights(tmp_path: Path, tiny_gguf: ModelFiles) -> None:
    (tmp_path / "alone").mkdir()
    shutil.copy(TINY / "qwen2" / "config.json", tmp_path / "alone")
    expected = ("alone", from_hf(config_json("qwen2")))
    assert model_config(str(tmp_path / "alone" / "config.json")) == expected
    assert model_config(str(tmp_path / "alone")) == expected
    assert model_config(str(tiny_gguf.path)) == ("tiny", from_hf(config_json("llama3")))


def test_a_missing_config_is_no_hub_model() -> None:
    with pytest.raises(ConfigError, match=r"^nowhere/config.json cannot be read"):
        model_config("nowhere/config.json")


def test_of_a_hub_model_only_the_config_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(repository: str, *, allow_patterns: list[str]) -> str:
        assert allow_patterns == ["config.json", "generation_config.json"]
        return str(TINY / "qwen2")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert model_config("org/name") == ("org/name", from_hf(config_json("qwen2")))


@pytest.mark.parametrize("spec", ["smollm", "./nowhere", "missing.gguf", "org/missing.gguf", "a/b/c", ""])
def test_anything_else_lists_what_is_allowed(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no such model.*smollm2-135m-instruct.*\.gguf file.*hub id"):
        resolve_model(spec)


def test_a_hub_id_that_cannot_be_reached_names_itself_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigError, match=r"'jkv-tests/no-such-model'.*the hub does not give it: ."):
        resolve_model("jkv-tests/no-such-model", progress=False)


def test_directories_that_are_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="LoRA"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_checkpoint(resolve_model(str(tmp_path)))


def test_a_gguf_is_converted_once(
    tiny_gguf: ModelFiles, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "orbax").mkdir(parents=True)
    copy = cached_orbax(tiny_gguf)
    assert (copy.kind, copy.name, copy.tokenizer) == ("orbax", "tiny", tiny_gguf.path)
    assert "converting tiny.gguf once" in capsys.readouterr().err
    before, after = open_checkpoint(tiny_gguf), open_checkpoint(copy)
    assert after.config == before.config
    assert after.source.fingerprint() == before.source.fingerprint()
    for name in before.source.names():
        np.testing.assert_array_equal(after.source.read(name), before.source.read(name))

    def refuse(*_: object) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr(orbax_convert, "convert", refuse)
    assert cached_orbax(tiny_gguf) == copy
    assert capsys.readouterr().err == ""


def test_leftovers_of_a_killed_conversion_are_swept(tiny_gguf: ModelFiles, home: Path) -> None:
    fingerprint = open_checkpoint(tiny_gguf).source.fingerprint().hex()
    leftover = home / "orbax" / f".{fingerprint}-v1.{'0' * 32}"
    leftover.mkdir(parents=True)
    copy = cached_orbax(tiny_gguf, progress=False)
    assert copy.kind == "orbax"
    assert not leftover.exists()


def test_a_conversion_that_fails_falls_back_to_the_gguf(
    tiny_gguf: ModelFiles, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home.write_text("a file where the cache should be")
    assert cached_orbax(tiny_gguf) == tiny_gguf
    assert "tiny.gguf has no converted copy" in caplog.text


@pytest.mark.parametrize(("kind", "copied"), [("Q4_1", False), ("Q5_0", True)])
def test_where_codes_are_taken_only_other_types_are_converted(
    tmp_path: Path, kind: str, copied: bool
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(
        path, "llama", from_hf(config_json("llama3")), weights("llama3"), quantized=GGMLQuantizationType[kind]
    )
    files = resolve_model(str(path))
    assert (cached_orbax(files, codes=True, progress=False).kind == "orbax") == copied
    assert cached_orbax(files, progress=False).kind == "orbax"


def test_other_kinds_are_not_converted() -> None:
    files = resolve_model(str(TINY / "qwen2"))
    assert cached_orbax(files) is files


def test_converting_a_gguf_writes_its_tokenizer(tmp_path: Path) -> None:
    bytes_and_ab = [*sorted(ByteLevel.alphabet()), "ab"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<pad>", "<s>", "</s>", *bytes_and_ab],
        "tokenizer.ggml.token_type": [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * len(bytes_and_ab),
        "tokenizer.ggml.merges": ["a b"],
    }
    path, out = tmp_path / "tiny.gguf", tmp_path / "out"
    write_gguf(path, "llama", from_hf(config_json("llama3")), weights("llama3"), fields=fields)
    convert(resolve_model(str(path)), out)
    assert resolve_model(str(out)).tokenizer == out
    before, after = Tokenizer.from_gguf(path), Tokenizer.from_directory(out)
    for text in ("abba é 12", "</s>ab"):
        ids = after.encode(text, add_special_tokens=False)
        assert ids == before.encode(text, add_special_tokens=False)
        assert after.decode(ids, skip_special_tokens=False) == text
    assert after.eos_token_id == 2
