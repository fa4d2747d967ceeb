"""A tokenizer from Hugging Face files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from jkv.errors import ConfigError
from jkv.text.parts import TokenizerParts

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
_SPECIAL_FILE = "special_tokens_map.json"
_TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_JSON = "chat_template.json"


def read_directory(path: Path) -> TokenizerParts:
    """Read `tokenizer.json` and what lies beside it.

    As in transformers 5, tokenizer.json alone says which special tokens a raw prompt gets, and a
    chat_template.jinja goes before the template in tokenizer_config.json.

    Raises:
        ConfigError: tokenizer.json is missing, or a file or field cannot be read; the message names it.
    """
    config = _json(path / CONFIG_FILE)
    special = {**_json(path / _SPECIAL_FILE), **config}
    return TokenizerParts(
        backend=_backend(path / TOKENIZER_FILE),
        bos_token=_token(special, "bos_token", path),
        eos_token=_token(special, "eos_token", path),
        chat_template=_chat_template(path, config),
    )


def _backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing; transformers writes it from other tokenizer files: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"{path} cannot be read: {error}") from error
    # Saved by training scripts; prompts are never cut or filled up here.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _token(fields: dict[str, Any], name: str, path: Path) -> str | None:
    """A token written as its text or as an AddedToken object."""
    value = fields.get(name)
    content = value.get("content") if isinstance(value, dict) else value
    if content is None or isinstance(content, str):
        return content
    raise ConfigError(f"{path}: {name} {value!r} must be a string or an object with a string `content`")


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    if (path / _TEMPLATE_FILE).is_file():
        try:
            return (path / _TEMPLATE_FILE).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path / _TEMPLATE_FILE} cannot be read: {error}") from error
    for name, fields in ((_TEMPLATE_JSON, _json(path / _TEMPLATE_JSON)), (CONFIG_FILE, config)):
        if (value := fields.get("chat_template")) is not None:
            return _default_template(value, path / name)
    return None


def _default_template(value: Any, path: Path) -> str:
    """A template, or the one named "default" among several."""
    if isinstance(value, str):
        return value
    try:
        named = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError):
        raise ConfigError(
            f"{path}: chat_template must be a string or a list of objects with `name` and `template`"
        ) from None
    if not isinstance(named.get("default"), str):
        raise ConfigError(f'{path}: chat_template has {sorted(named)}, and no template named "default"')
    return named["default"]


def _json(path: Path) -> dict[str, Any]:
    """The object in a file, or an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}: it must be a JSON object")
    return content
