"""From what the user calls a model to its files, and from the files to an open checkpoint."""

from __future__ import annotations

import functools
import json
import logging
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import disable_progress_bars

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.models import fetch, orbax_convert, orbax_metadata, safetensors_source, tokenizer_files
from jkv.models.config import ModelConfig
from jkv.models.gguf_config import config_from_file
from jkv.models.gguf_file import read_gguf
from jkv.models.gguf_source import GgufSource
from jkv.models.hf_config import from_hf
from jkv.models.hf_names import with_parameter_names
from jkv.models.orbax_source import OrbaxSource
from jkv.models.safetensors_source import SafetensorsSource
from jkv.models.source import TensorSource
from jkv.paths import cache_dir, locked

_log = logging.getLogger(__name__)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_CONFIGS = ["config.json", "generation_config.json"]
_HUB_FILES = [
    "model.safetensors",
    "model-*.safetensors",
    safetensors_source.INDEX,
    *_HUB_CONFIGS,
    *tokenizer_files.FILES,
]


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model on this machine. `path` is a directory, or the file for gguf.

    `tokenizer` is a directory with tokenizer.json or a .gguf file; None where the model came without one.
    `name` is what the server calls the model unless it is told otherwise.
    """

    kind: Literal["safetensors", "gguf", "orbax"]
    path: Path
    tokenizer: Path | None
    name: str


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An open model: reading a tensor may still find damage."""

    config: ModelConfig
    source: TensorSource


def resolve_model(spec: str, *, progress: bool = True, weights: bool = True) -> ModelFiles:
    """Find `spec`, fetching it if need be.

    Args:
        spec: a built-in name, a directory (Hugging Face or converted), a .gguf file, or a hub id `org/name`.
        progress: report downloads on stderr.
        weights: whether the tensors are wanted of a model that the hub keeps apart from its config.

    Raises:
        ConfigError: nothing of that name, or it cannot be fetched; the message lists what is allowed.
        UnsupportedModelError: a LoRA adapter.
    """
    if (built_in := fetch.BUILT_IN.get(spec)) is not None:
        path = fetch.fetch(built_in, progress=progress)
        return ModelFiles(kind="gguf", path=path, tokenizer=path, name=spec)
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        return _directory(path, path.resolve().name)
    if path.suffix == ".gguf" and path.is_file():
        return ModelFiles(kind="gguf", path=path, tokenizer=path, name=path.stem)
    if _HUB_ID.fullmatch(spec) and path.suffix != ".gguf":
        return _directory(_from_hub(spec, progress=progress, weights=weights), spec)
    raise ConfigError(
        f"--model {spec!r}: no such model. It must be a built-in name ({', '.join(fetch.BUILT_IN)}), an "
        "existing directory with safetensors or a converted checkpoint, an existing .gguf file, or a hub id "
        "such as org/name"
    )


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Read the config and open the tensors; no weights are read yet.

    Raises:
        ConfigError: a file that is missing or damaged, or a config value that cannot be right.
        UnsupportedModelError: an architecture, field or tensor that jkv does not implement.
    """
    if files.kind == "orbax":
        return Checkpoint(config=_read_config(files), source=OrbaxSource(files.path))
    if files.kind == "gguf":
        file = read_gguf(files.path)
        config = config_from_file(file)
        return Checkpoint(config=config, source=GgufSource(file, config))
    config = _read_config(files)
    return Checkpoint(
        config=config, source=with_parameter_names(SafetensorsSource(files.path), config.architecture)
    )


def model_config(spec: str, *, progress: bool = True) -> tuple[str, ModelConfig]:
    """The name and the config of what `resolve_model` finds, or of a config.json by itself. No weights are
    read, and none fetched from the hub.

    Raises:
        ConfigError, UnsupportedModelError: as `resolve_model` and `open_checkpoint`.
    """
    path = Path(spec).expanduser()
    if path.suffix == ".json":
        return path.resolve().parent.name, from_hf(_json(path))
    files = resolve_model(spec, progress=progress, weights=False)
    return files.name, _read_config(files)


def _read_config(files: ModelFiles) -> ModelConfig:
    if files.kind == "orbax":
        return orbax_metadata.read_metadata(files.path).config
    if files.kind == "gguf":
        return config_from_file(read_gguf(files.path))
    generation = files.path / "generation_config.json"
    return from_hf(_json(files.path / "config.json"), _json(generation) if generation.is_file() else None)


def cached_orbax(files: ModelFiles, *, codes: bool = False, progress: bool = True) -> ModelFiles:
    """The Orbax copy of a GGUF in the cache, converted on the first call; other kinds are returned, and with
    `codes`, which are then read instead of values, a GGUF that has them of all quantized tensors.

    The copy is keyed by the GGUF's fingerprint and the format's version; the tokenizer stays the GGUF's.
    Where it cannot be made, a warning says why and the GGUF itself is returned.
    """
    if files.kind != "gguf":
        return files
    checkpoint = open_checkpoint(files)
    if codes and isinstance(checkpoint.source, GgufSource) and not checkpoint.source.dequantizes():
        return files
    directory = cache_dir() / "orbax"
    path = directory / f"{checkpoint.source.fingerprint().hex()}-v{orbax_metadata.FORMAT}"
    try:
        if not path.is_dir():
            _convert_once(files, checkpoint, path, progress=progress)
    except ConfigError as error:
        _log.warning("%s has no converted copy and is read as it is: %s", files.path, error)
        return files
    return ModelFiles(kind="orbax", path=path, tokenizer=files.tokenizer, name=files.name)


def convert(files: ModelFiles, out: Path, *, dtype: str | None = None) -> None:
    """Write the model and its tokenizer as an Orbax checkpoint; see `orbax_convert.convert`."""
    save = None
    if files.tokenizer is not None:
        save = functools.partial(tokenizer_files.copy_tokenizer, files.tokenizer)
    checkpoint = open_checkpoint(files)
    orbax_convert.convert(checkpoint.source, checkpoint.config, out, dtype=dtype, save_tokenizer=save)


def _convert_once(files: ModelFiles, checkpoint: Checkpoint, path: Path, *, progress: bool) -> None:
    with locked(path.parent):
        for leftover in path.parent.glob(f".{path.name}.*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        if path.is_dir():
            return
        if progress:
            print(f"converting {files.path.name} once, into {path}", file=sys.stderr, flush=True)
        orbax_convert.convert(checkpoint.source, checkpoint.config, path)


def _directory(path: Path, name: str) -> ModelFiles:
    tokenizer = path if (path / "tokenizer.json").is_file() else None
    if (path / orbax_metadata.FILE).is_file():
        return ModelFiles(kind="orbax", path=path, tokenizer=tokenizer, name=name)
    if (path / "adapter_config.json").is_file():
        raise UnsupportedModelError(f"{path} is a LoRA adapter: jkv serves whole models only")
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path} is no model directory: it has neither config.json (Hugging Face) nor "
            f"{orbax_metadata.FILE} (written by python -m jkv.convert)"
        )
    return ModelFiles(kind="safetensors", path=path, tokenizer=tokenizer, name=name)


def _from_hub(repository: str, *, progress: bool, weights: bool) -> Path:
    if not progress:
        disable_progress_bars()
    wanted = _HUB_FILES if weights else _HUB_CONFIGS
    try:
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=wanted))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(
            f"--model {repository!r} is no local path, and the hub does not give it: {error}; "
            "download it where the hub can be reached and pass the directory"
        ) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}: it must be a JSON object")
    return content
