"""The tokenizer fields of a GGUF's metadata, checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from gguf import TokenType

from jkv.errors import ConfigError

T = TypeVar("T")
_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"


class GgufVocabulary:
    """`tokens[i]` and `types[i]` are those of id i; `ids` finds a token that is in use."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self._metadata = metadata
        self.path = path
        self.tokens: list[str] = self.array("tokens", str)
        self.types: list[int] = self.array("token_type", int, len(self.tokens))
        # Unused ids only fill the embedding up; in a vocabulary their names could match text.
        in_use = [i for i, kind in enumerate(self.types) if kind != TokenType.UNUSED]
        self.ids = {self.tokens[i]: i for i in in_use}
        if len(self.ids) != len(in_use):
            raise ConfigError(f"{path}: {_PREFIX}tokens has the same token twice")

    def of_type(self, kind: TokenType) -> list[str]:
        return [
            token for token, token_type in zip(self.tokens, self.types, strict=True) if token_type == kind
        ]

    def field(self, key: str, kind: type[T], default: T | None = None) -> T:
        """A scalar field.

        Raises:
            ConfigError: it is missing and has no default, or is of another type.
        """
        value = self._metadata.get(_PREFIX + key, default)
        if value is None:
            raise ConfigError(f"{self.path}: the metadata has no {_PREFIX}{key}")
        if not isinstance(value, kind):
            raise ConfigError(f"{self.path}: {_PREFIX}{key} {value!r} must be of type {kind.__name__}")
        return value

    def array(self, key: str, kind: type[T], length: int | None = None) -> list[T]:
        """An array field, of one item per token where `length` is given.

        Raises:
            ConfigError: it is missing, holds another type, or has another length.
        """
        values = self.field(key, list)
        if not values or not all(type(value) is kind for value in values):
            raise ConfigError(f"{self.path}: {_PREFIX}{key} must be an array of {kind.__name__}")
        if length is not None and len(values) != length:
            raise ConfigError(
                f"{self.path}: {_PREFIX}{key} has {len(values)} items: there are {length} tokens"
            )
        return values

    def token_at(self, key: str) -> str | None:
        """The token whose id a field holds, or None without that field.

        Raises:
            ConfigError: the id has no token in use.
        """
        if _PREFIX + key not in self._metadata:
            return None
        token_id = self.field(key, int)
        if not 0 <= token_id < len(self.tokens) or self.tokens[token_id] not in self.ids:
            raise ConfigError(
                f"{self.path}: {_PREFIX}{key} {token_id} must be the id of one of the {len(self.ids)} tokens"
            )
        return self.tokens[token_id]

    def has(self, key: str) -> bool:
        return _PREFIX + key in self._metadata

    def chat_template(self) -> str | None:
        template = self._metadata.get(_TEMPLATE)
        if template is not None and not isinstance(template, str):
            raise ConfigError(f"{self.path}: {_TEMPLATE} must be a string")
        return template
