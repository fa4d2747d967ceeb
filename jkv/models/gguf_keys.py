"""Typed, accounted-for reads of a GGUF's metadata: what nobody read is refused, never ignored."""

from __future__ import annotations

from typing import Any

import numpy as np

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.models.gguf_file import GgufFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_NEUTRAL = frozenset({"vocab_size", "rope.scaling.finetuned", "tensor_data_layout"})


class Keys:
    """The `{architecture}.*` keys, each marked as read, so that the rest can be refused by name."""

    def __init__(self, file: GgufFile) -> None:
        self._path = file.path
        name = file.metadata.get("general.architecture")
        if name not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{file.path}: general.architecture={name!r} is not supported: "
                f"jkv runs {', '.join(ARCHITECTURES)}"
            )
        self.architecture = ARCHITECTURES[name]
        self._prefix = f"{name}."
        self._metadata = file.metadata
        self._read: set[str] = set()

    def get(self, key: str) -> Any:
        self._read.add(key)
        return self._metadata.get(self._prefix + key)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer; without a default the key must be there."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{self._path}: {self._prefix}{key}={value!r}: it must be a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number, as the shortest decimal of its float32: 1e-05 and not 9.999999747e-06."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"{self._path}: {self._prefix}{key}={value!r}: it must be a positive number")
        return float(str(np.float32(value)))

    def require(self, key: str, allowed: tuple[Any, ...]) -> None:
        value = self.get(key)
        if value is not None and value not in allowed:
            raise UnsupportedModelError(
                f"{self._path}: {self._prefix}{key}={value!r} is not supported: "
                f"jkv implements {' or '.join(map(repr, allowed))}"
            )

    def refuse_unread(self) -> None:
        known = self._read | _NEUTRAL
        unknown = sorted(
            f"{key}={value!r}"
            for key, value in self._metadata.items()
            if key.startswith(self._prefix) and key.removeprefix(self._prefix) not in known
        )
        if unknown:
            raise UnsupportedModelError(
                f"{self._path} has keys that jkv does not know and so cannot honour: {', '.join(unknown)}"
            )
