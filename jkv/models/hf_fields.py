"""Typed, accounted-for reads of a Hugging Face config: what nobody read is refused, never ignored."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from jkv.errors import ConfigError, UnsupportedModelError


class Fields:
    """One JSON object of a config. Every getter marks its field as read; `refuse_unread` rejects the rest.

    A field that is absent takes the family's default; one that is present with the wrong type is a
    ConfigError with the field's name, its value and what is allowed.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._defaults = defaults
        self._prefix = prefix
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """The field as it is, or the family's default, or None."""
        self._read.add(name)
        return self._values.get(name, self._defaults.get(name))

    def either(self, name: str, other: str) -> str:
        """Of two names of one field, the one that is there, or `name`.

        Raises:
            ConfigError: both are there and differ.
        """
        if other not in self._values:
            return name
        self._read |= {name, other}
        if name in self._values and self._values[name] != self._values[other]:
            raise ConfigError(
                f"config fields {self._prefix}{name}={self._values[name]!r} and "
                f"{self._prefix}{other}={self._values[other]!r} disagree"
            )
        return other

    def positive_int(self, name: str) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._bad(name, value, "a positive integer")
        return value

    def optional_positive_int(self, name: str) -> int | None:
        return None if self.get(name) is None else self.positive_int(name)

    def positive_float(self, name: str) -> float:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._bad(name, value, "a positive number")
        if not (math.isfinite(value) and value > 0):
            raise self._bad(name, value, "a positive number")
        return float(value)

    def optional_positive_float(self, name: str) -> float | None:
        return None if self.get(name) is None else self.positive_float(name)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise self._bad(name, value, "true or false")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """None, one id or a list of ids, as a tuple."""
        value = self.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self._bad(name, value, "a token id, a list of token ids or null")
        return tuple(ids)

    def require(self, name: str, allowed: Collection[Any]) -> None:
        """Refuse a field that jkv implements for some values only; None counts as absent."""
        value = self.get(name)
        if value is not None and value not in allowed:
            choices = " or ".join(repr(a) for a in allowed)
            raise UnsupportedModelError(
                f"config field {self._prefix}{name}={value!r} is not supported: jkv implements {choices}"
            )

    def refuse_unread(self, neutral: Collection[str]) -> None:
        """Refuse the fields that nothing has read, are not known to be neutral, and are not null or false.

        Raises:
            UnsupportedModelError: it names every such field with its value.
        """
        unknown = sorted(
            f"{self._prefix}{name}={value!r}"
            for name, value in self._values.items()
            if name not in self._read and name not in neutral and value is not None and value is not False
        )
        if unknown:
            raise UnsupportedModelError(
                "config fields that jkv does not know and so cannot honour: "
                + ", ".join(unknown)
                + "; remove them from config.json if they do not change the model's output"
            )

    def _bad(self, name: str, value: Any, allowed: str) -> ConfigError:
        return ConfigError(f"config field {self._prefix}{name}={value!r}: it must be {allowed}")
