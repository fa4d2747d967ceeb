"""Command-line flags and TOML files from one dataclass.

A field made with `flag()` is at once an attribute, a `--flag`, a TOML key and its own documentation. Values
are converted here for both sources; ranges and choices are checked by `check()`, which the dataclass calls
from `__post_init__`, so that an object built in code is held to the same limits.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from jkv.errors import ConfigError

T = TypeVar("T")

_KEY = "flag"
_EXPECTED = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


@dataclass(frozen=True, kw_only=True)
class FlagSpec:
    """What a field adds to its type: help, limits, and how text becomes its value."""

    help: str
    group: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    exclusive: str = ""
    parse: Callable[[str], Any] | None = None
    metavar: str = ""
    default_text: str = ""


def flag(default: Any = None, *, default_factory: Callable[[], Any] | None = None, **spec: Any) -> Any:
    """A dataclass field that is also a flag; `spec` are the fields of `FlagSpec`.

    At most one flag of the same `exclusive` name may differ from None. `parse` raises ValueError with what is
    allowed. `default_text` replaces the default in the help where None or a factory would say nothing.
    """
    metadata = {_KEY: FlagSpec(**spec)}
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def same_flag(cls: type, attribute: str) -> Any:
    """A field that is the same flag as another dataclass has."""
    (field,) = (item for item in dataclasses.fields(cls) if item.name == attribute)
    return dataclasses.field(default=field.default, metadata=field.metadata)


@dataclass(frozen=True, kw_only=True)
class _Flag:
    """A field seen as a flag: `kind` is bool, int, float or str; `many` marks a `tuple[kind, ...]`."""

    attribute: str
    kind: type
    many: bool
    default: Any
    spec: FlagSpec

    @property
    def name(self) -> str:
        return self.attribute.replace("_", "-")


def _flags(cls: type) -> tuple[_Flag, ...]:
    hints = get_type_hints(cls)
    found = []
    for item in dataclasses.fields(cls):
        if _KEY not in item.metadata:
            continue
        kinds = [kind for kind in get_args(hints[item.name]) if kind is not NoneType and kind is not Ellipsis]
        kind = kinds[0] if kinds else hints[item.name]
        many = get_origin(hints[item.name]) is tuple
        spec = item.metadata[_KEY]
        found.append(_Flag(attribute=item.name, kind=kind, many=many, default=item.default, spec=spec))
    return tuple(found)


def check(config: Any) -> None:
    """Hold every flag of a dataclass instance to its choices, range and exclusiveness.

    Raises:
        ConfigError: names the flag, its value and what is allowed.
    """
    chosen: dict[str, str] = {}
    for item in _flags(type(config)):
        value = getattr(config, item.attribute)
        for one in value if item.many else (value,):
            _check_value(item, one)
        if item.spec.exclusive and value is not None:
            other = chosen.setdefault(item.spec.exclusive, item.name)
            if other != item.name:
                raise ConfigError(f"--{other} and --{item.name}: give one of them, not both")


def _check_value(item: _Flag, value: Any) -> None:
    spec = item.spec
    if value is None:
        return
    if spec.choices and value not in spec.choices:
        raise ConfigError(f"--{item.name} {value}: must be one of {', '.join(spec.choices)}")
    if item.kind not in (int, float):
        return
    low, high = spec.minimum, spec.maximum
    if not math.isfinite(value) or (low is not None and value < low) or (high is not None and value > high):
        raise ConfigError(f"--{item.name} {value}: must be {_range_text(low, high)}")


def _range_text(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"from {low} to {high}"
    if low is not None:
        return f"{low} or more"
    return f"{high} or less" if high is not None else "a finite number"


def _convert(item: _Flag, raw: Any, where: str) -> Any:
    """Text from the command line, or a TOML value, as the field's type."""
    if item.kind is bool and isinstance(raw, bool):
        return raw
    try:
        if item.spec.parse is not None:
            if isinstance(raw, bool) or not isinstance(raw, str | int | float):
                raise ValueError(f"expected {_EXPECTED[item.kind]}")
            return item.spec.parse(str(raw))
        if isinstance(raw, str):
            return _from_text(item.kind, raw)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if item.kind is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if type(raw) is not item.kind:
        raise ConfigError(f"{where}: expected {_EXPECTED[item.kind]}")
    return raw


def _from_text(kind: type, raw: str) -> Any:
    if kind is str:
        return raw
    if kind is bool:
        raise ValueError(f"expected {_EXPECTED[kind]}")
    try:
        return kind(raw)
    except ValueError:
        raise ValueError(f"expected {_EXPECTED[kind]}") from None


def add_flags(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add a dataclass's flags to a parser, one argument group per `group`, every default in the help."""
    groups: dict[str, Any] = {}
    for item in _flags(cls):
        spec = item.spec
        if spec.group not in groups:
            groups[spec.group] = parser.add_argument_group(spec.group)
        options: dict[str, Any] = {"default": None, "help": _help(item).replace("%", "%%")}
        if item.kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["action"] = "append" if item.many else "store"
            number = "N" if item.kind in (int, float) else item.attribute.upper()
            options["metavar"] = spec.metavar or (
                "{" + ",".join(spec.choices) + "}" if spec.choices else number
            )
        groups[spec.group].add_argument(f"--{item.name}", dest=item.attribute, **options)


def _help(item: _Flag) -> str:
    if item.spec.default_text:
        return f"{item.spec.help} (default: {item.spec.default_text})"
    if item.default is None or item.default == ():
        return f"{item.spec.help} (default: none)"
    default = {True: "on", False: "off"}[item.default] if item.kind is bool else item.default
    return f"{item.spec.help} (default: {default})"


def given(cls: type, namespace: argparse.Namespace) -> dict[str, Any]:
    """The flags that were on the command line, converted.

    Raises:
        ConfigError: a value that is not of the flag's type.
    """
    values: dict[str, Any] = {}
    for item in _flags(cls):
        raw = getattr(namespace, item.attribute)
        if raw is None:
            continue
        if item.many:
            values[item.attribute] = tuple(_convert(item, one, f"--{item.name} {one}") for one in raw)
        else:
            values[item.attribute] = _convert(item, raw, f"--{item.name} {raw}")
    return values


def read_toml(cls: type, path: Path) -> dict[str, Any]:
    """The values of a TOML file whose keys are the flags' names without the dashes in front.

    Raises:
        ConfigError: a file that cannot be read or parsed, an unknown key, a value of another type.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from error
    known = {item.name: item for item in _flags(cls)}
    values: dict[str, Any] = {}
    for key, raw in document.items():
        if key not in known:
            raise ConfigError(f"--config {path}: unknown key {key!r}{_suggestion(key, known)}")
        item, where = known[key], f"--config {path}: {key} = {raw!r}"
        if item.many:
            if not isinstance(raw, list):
                raise ConfigError(f"{where}: expected an array")
            values[item.attribute] = tuple(_convert(item, one, where) for one in raw)
        else:
            values[item.attribute] = _toml_value(item, raw, where)
    return values


def _toml_value(item: _Flag, raw: Any, where: str) -> Any:
    if isinstance(raw, str) and item.kind is not str and item.spec.parse is None:
        raise ConfigError(f"{where}: expected {_EXPECTED[item.kind]}, without quotes")
    return _convert(item, raw, where)


def _suggestion(key: str, known: Mapping[str, _Flag]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(known)}"


def parse(cls: type[T], argv: Sequence[str] | None, *, prog: str, description: str) -> T:
    """Build a dataclass from its flags and an optional `--config FILE.toml`; a flag wins over the file.

    Raises:
        ConfigError: any value that cannot be used.
        SystemExit: `--help`, or an unknown flag (argparse prints the usage; status 2).
    """
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    parser.add_argument(
        "--config", metavar="FILE.toml", help="read flags from a TOML file; a flag given here wins"
    )
    add_flags(parser, cls)
    namespace = parser.parse_args(argv)
    flags = given(cls, namespace)
    values = read_toml(cls, Path(namespace.config)) if namespace.config else {}
    settled = {item.spec.exclusive for item in _flags(cls) if item.attribute in flags} - {""}
    for item in _flags(cls):
        if item.spec.exclusive in settled:
            values.pop(item.attribute, None)
    return cls(**{**values, **flags})
