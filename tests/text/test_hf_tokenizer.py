from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from jkv.errors import ConfigError
from jkv.text.hf_tokenizer import read_directory
from jkv.text.tokenizer import Tokenizer, save_tokenizer
from tests.text.gguf_files import build_tokenizer, byte_level_fields


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_tokenizer(build_tokenizer(byte_level_fields()), tmp_path)
    return tmp_path


def write(directory: Path, name: str, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / name).write_text(text)


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "lstrip": False, "special": True}])
def test_tokens_as_strings_or_objects(directory: Path, eos: Any) -> None:
    write(directory, "tokenizer_config.json", {"bos_token": None, "eos_token": eos})
    tokenizer = Tokenizer.from_directory(directory)
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == (None, None)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 262)


def test_tokens_from_the_special_tokens_map(directory: Path) -> None:
    write(directory, "tokenizer_config.json", {"eos_token": "</s>"})
    write(directory, "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "eos_token": "<s>"})
    tokenizer = Tokenizer.from_directory(directory)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {}}, None),
        ({"tokenizer_config.json": {"chat_template": "config"}}, "config"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "tools"},
                        {"name": "default", "template": "plain"},
                    ]
                }
            },
            "plain",
        ),
        (
            {
                "tokenizer_config.json": {"chat_template": "config"},
                "chat_template.json": {"chat_template": "own file"},
            },
            "own file",
        ),
        (
            {
                "tokenizer_config.json": {"chat_template": "config"},
                "chat_template.json": {"chat_template": "own file"},
                "chat_template.jinja": "jinja file",
            },
            "jinja file",
        ),
    ],
)
def test_where_the_chat_template_comes_from(
    directory: Path, files: dict[str, Any], expected: str | None
) -> None:
    for name, content in files.items():
        write(directory, name, content)
    assert read_directory(directory).chat_template == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer.json", {"model": {"type": "New"}}, "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", [], "tokenizer_config.json holds list"),
        ("tokenizer_config.json", {"eos_token": 3}, "eos_token 3 must be a string"),
        ("tokenizer_config.json", {"chat_template": 3}, "chat_template must be a string or a list"),
        (
            "tokenizer_config.json",
            {"chat_template": [{"name": "rag", "template": "x"}]},
            r"chat_template has \['rag'\]",
        ),
    ],
)
def test_damaged_files_are_named(directory: Path, name: str, content: Any, message: str) -> None:
    write(directory, name, content)
    with pytest.raises(ConfigError, match=message):
        read_directory(directory)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer.json is missing"):
        Tokenizer.from_directory(tmp_path)


def test_saved_truncation_and_padding_do_not_apply(directory: Path) -> None:
    path = directory / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=64)
    backend.save(str(path))
    assert len(Tokenizer.from_directory(directory).encode("q" * 9, add_special_tokens=True)) == 9
