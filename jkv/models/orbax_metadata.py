"""What a converted checkpoint carries beside its weights: `jkv.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from jkv.errors import ConfigError
from jkv.models.config import ExpertsConfig, ModelConfig, RopeConfig

FILE = "jkv.json"
WEIGHTS = "weights"  # the Orbax checkpoint, in the same directory
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class OrbaxMetadata:
    """`fingerprint` is the converted checkpoint's own; `tensors` maps a name to its shape and dtype."""

    config: ModelConfig
    fingerprint: bytes
    tensors: Mapping[str, tuple[tuple[int, ...], str]]

    def write(self, directory: Path) -> None:
        content = {
            "format": FORMAT,
            "fingerprint": self.fingerprint.hex(),
            "config": asdict(self.config),
            "tensors": {name: [list(shape), dtype] for name, (shape, dtype) in self.tensors.items()},
        }
        (directory / FILE).write_text(json.dumps(content, indent=1) + "\n")


def read_metadata(directory: Path) -> OrbaxMetadata:
    """Read `jkv.json`.

    Raises:
        ConfigError: it is missing, damaged, or of another format version.
    """
    path = directory / FILE
    try:
        content = json.loads(path.read_text())
        if content["format"] == FORMAT:
            return OrbaxMetadata(
                config=_config(content["config"]),
                fingerprint=bytes.fromhex(content["fingerprint"]),
                tensors={name: (tuple(shape), dtype) for name, (shape, dtype) in content["tensors"].items()},
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error!r}; convert the model again") from error
    raise ConfigError(
        f"{path} has format={content['format']!r}: this jkv reads {FORMAT}; convert the model again"
    )


def _config(values: dict) -> ModelConfig:
    # Absent before there were models with them.
    local, experts = values.get("local_rope"), values.get("experts")
    changes = {
        "rope": RopeConfig(**values["rope"]),
        "local_rope": None if local is None else RopeConfig(**local),
        "experts": None if experts is None else ExpertsConfig(**experts),
        "windows": tuple(values["windows"]),
        "eos_token_ids": tuple(values["eos_token_ids"]),
    }
    return ModelConfig(**{**values, **changes})
