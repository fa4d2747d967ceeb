"""Tensors of a Hugging Face directory: one `model.safetensors`, or shards named by an index."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.models.fingerprint import StoredTensor, fingerprint

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class SafetensorsSource:
    """A TensorSource that maps the files and reads a tensor when it is asked for.

    Raises:
        ConfigError: no checkpoint there, a missing shard or tensor, or a damaged file.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._shards = {name: _open(path) for name, path in _shard_paths(directory).items()}
        self._shard_of = self._locate()

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._shard_of))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        stored: str = self._file(name).get_slice(name).get_dtype()
        return _DTYPES.get(stored, stored)

    def read(self, name: str, *index: int | slice) -> np.ndarray:
        """The tensor in its stored type, or what an index into it gives; no more than that is read.

        Raises:
            UnsupportedModelError: it is stored in a type other than float32, float16 and bfloat16.
        """
        if (dtype := self.dtype(name)) not in _DTYPES.values():
            raise UnsupportedModelError(
                f"tensor {name} in {self._directory} is stored as {dtype}: "
                f"jkv reads {', '.join(_DTYPES.values())}"
            )
        file = self._file(name)
        return file.get_slice(name)[index] if index else file.get_tensor(name)

    def fingerprint(self) -> bytes:
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> bytes:
        return fingerprint(self._stored())

    def _stored(self) -> Iterator[StoredTensor]:
        for shard in self._shards:
            path = self._directory / shard
            for name, data in _stored_bytes(path):
                if self._shard_of.get(name) == shard:
                    yield StoredTensor(name=name, shape=self.shape(name), dtype=self.dtype(name), data=data)

    def _locate(self) -> dict[str, str]:
        held = {shard: set(file.keys()) for shard, file in self._shards.items()}
        index = self._directory / INDEX
        if not index.is_file():
            return {name: shard for shard, names in held.items() for name in names}
        weight_map = _weight_map(index)
        for name, shard in weight_map.items():
            if name not in held[shard]:
                raise ConfigError(f"{index} places tensor {name} in {shard}, which does not hold it")
        return weight_map

    def _file(self, name: str) -> Any:
        try:
            return self._shards[self._shard_of[name]]
        except KeyError:
            raise ConfigError(f"the checkpoint {self._directory} has no tensor {name}") from None


def _shard_paths(directory: Path) -> dict[str, Path]:
    index = directory / INDEX
    if index.is_file():
        shards = sorted(set(_weight_map(index).values()))
        missing = [shard for shard in shards if not (directory / shard).is_file()]
        if missing:
            raise ConfigError(f"{index} names shards that are missing: {', '.join(missing)}")
        return {shard: directory / shard for shard in shards}
    if (directory / SINGLE).is_file():
        return {SINGLE: directory / SINGLE}
    raise ConfigError(f"{directory} holds neither {SINGLE} nor {INDEX}")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{index} is not a safetensors index: {error!r}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} is not a safetensors index: weight_map={weight_map!r}")
    return weight_map


def _open(path: Path) -> Any:
    try:
        # Never closed by hand: the mapping lives as long as the source.
        opened: AbstractContextManager[Any] = safe_open(str(path), framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}") from error
    return opened


def _stored_bytes(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Name and uint8 view of each tensor; the format is a u64 header size, a JSON header, then the data."""
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    start = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
    header = json.loads(mapped[8:start].tobytes())
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, mapped[start + begin : start + end]
