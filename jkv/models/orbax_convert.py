"""Writing any checkpoint as an Orbax one: float32 or bfloat16 tensors under their Hugging Face names."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np

from jkv.errors import ConfigError
from jkv.models.config import ModelConfig
from jkv.models.fingerprint import derived
from jkv.models.orbax_metadata import WEIGHTS, OrbaxMetadata
from jkv.models.orbax_source import checkpointer
from jkv.models.source import TensorSource

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def convert(
    source: TensorSource,
    config: ModelConfig,
    out: Path,
    *,
    dtype: str | None = None,
    save_tokenizer: Callable[[Path], None] | None = None,
) -> None:
    """Write `source` to the new directory `out`, all of it or nothing. Host memory: the size of the result.

    The copy carries the source's fingerprint where its values are the same, and one derived from it where
    values were rounded to bfloat16.

    Args:
        dtype: a key of `DTYPES`, or None to keep what the source reads.
        save_tokenizer: writes the tokenizer's files into a directory.

    Raises:
        ConfigError: `out` exists, or cannot be written.
    """
    if out.exists():
        raise ConfigError(f"{out} already exists: remove it or name another directory")
    out = out.absolute()
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
        tensors, exact = _read_all(source, dtype)
        _check_space(temporary, sum(values.nbytes for values in tensors.values()))
        if save_tokenizer is not None:
            save_tokenizer(temporary)
        with _quiet_absl(), checkpointer() as orbax:
            orbax.save(temporary / WEIGHTS, tensors)
        OrbaxMetadata(
            config=config,
            fingerprint=source.fingerprint() if exact else derived(source.fingerprint(), str(dtype)),
            tensors={name: (values.shape, values.dtype.name) for name, values in tensors.items()},
        ).write(temporary)
        os.rename(temporary, out)
    except (OSError, ValueError) as error:  # tensorstore reports a full disk as ValueError
        raise ConfigError(f"{out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read_all(source: TensorSource, dtype: str | None) -> tuple[dict[str, np.ndarray], bool]:
    """Every tensor in `dtype`, and whether all kept their values."""
    target = None if dtype is None else DTYPES[dtype]

    def read(name: str) -> tuple[str, np.ndarray, bool]:
        values = source.read(name)
        if target is None or values.dtype == target:
            return name, values, True
        return name, values.astype(target), target == np.float32

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        read_all = list(pool.map(read, source.names()))
    return {name: values for name, values, _ in read_all}, all(exact for *_, exact in read_all)


def _check_space(directory: Path, needed: int) -> None:
    """Raise OSError before Orbax starts: on a full disk its writers go on after the error, making files."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"it needs up to {needed / 1e6:.0f} MB and {free / 1e6:.0f} MB are free")


@contextlib.contextmanager
def _quiet_absl() -> Iterator[None]:
    """Orbax warns that there is no OCDBT to merge, which is on purpose."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
