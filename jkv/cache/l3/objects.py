"""A thin layer over TensorStore's KvStore: where a location leads, and what its errors mean."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import numpy as np
import tensorstore as ts

from jkv.cache.l3.reasons import Reason
from jkv.errors import ConfigError

_SCHEMES = ("file", "gs", "s3", "memory")
# TensorStore's URLs name no server. These do, the first that is set, as for AWS's own tools and SDKs.
_S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
# Its own patience is a quarter of an hour, for which a start would hang, and a write to a store that fails.
_RETRIES = {"max_retries": 5, "initial_delay": "250ms", "max_delay": "4s"}
_CONTEXT = {"s3_request_retries": _RETRIES, "gcs_request_retries": _RETRIES}
_ALIGNMENT = 64  # what XLA:CPU wants of memory
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_READ_ONLY = {errno.EPERM, errno.EACCES, errno.EROFS}


class ObjectError(Exception):
    """An operation on the store failed."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Operation(Protocol):
    """A read, write or delete under way."""

    def result(self) -> Any:
        """Waits for it; a read returns the object, bytes or a view of them, or None where there is none.

        Raises:
            ObjectError: it failed or was cancelled.
        """
        ...

    def cancel(self) -> None:
        """Makes `result` raise soon where that is possible; from any thread."""
        ...


class Objects(Protocol):
    """Named, immutable objects; a write publishes all of an object or nothing."""

    def read_page(self, name: str, size: int) -> Operation:
        """Reads an object that should have `size` bytes. One of more may be cut, but not to `size`."""
        ...

    def write(self, name: str, data: bytes) -> Operation: ...

    def delete(self, name: str) -> Operation:
        """Deleting what does not exist is no error."""
        ...


class _Future:
    def __init__(self, future: Any, value: Callable[[Any], bytes | None]) -> None:
        self._future, self._value = future, value

    def result(self) -> bytes | None:
        try:
            return self._value(self._future.result())
        except asyncio.CancelledError as error:
            raise ObjectError(Reason.CANCELLED, "cancelled") from error
        except (ValueError, OSError) as error:
            raise object_error(error) from error

    def cancel(self) -> None:
        self._future.cancel()


class _FileRead:
    """Reads a file without TensorStore, whose Python interface copies all that it read once more.

    Measured on pages of 2.8 MiB in the page cache, with their verification: 20 GiB/s against 8.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def result(self) -> bytes | memoryview | None:
        try:
            descriptor = os.open(self._path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise object_error(error) from error
        try:
            return self._read(descriptor)
        except OSError as error:
            raise object_error(error) from error
        finally:
            os.close(descriptor)

    def cancel(self) -> None:
        """The system call cannot be interrupted."""

    def _read(self, descriptor: int) -> bytes | memoryview:
        size = os.fstat(descriptor).st_size
        data = os.pread(descriptor, size, 0)
        while len(data) < size and (more := os.pread(descriptor, size - len(data), len(data))):
            data += more
        return data


class _PageFileRead(_FileRead):
    """Reads into memory that jax on CPU takes over as it is, instead of copying it."""

    def __init__(self, path: str, size: int) -> None:
        super().__init__(path)
        self._size = size

    def _read(self, descriptor: int) -> bytes | memoryview:
        room = self._size + 1  # a longer object is found to be longer
        buffer = np.empty(room + _ALIGNMENT, np.uint8)
        start = -buffer.ctypes.data % _ALIGNMENT
        view = buffer.data[start : start + room]
        read = os.preadv(descriptor, [view], 0)
        while read < self._size and (more := os.preadv(descriptor, [view[read:]], read)):
            read += more
        return view[:read].toreadonly()


class KvObjects:
    """The objects of a TensorStore KvStore. `root` is its directory where it is one, else None."""

    def __init__(self, kv: ts.KvStore, root: Path | None) -> None:
        self._kv, self.root = kv, root

    def read(self, name: str) -> Operation:
        if self.root is not None:
            return _FileRead(f"{self.root}/{name}")
        return _Future(self._kv.read(name), lambda got: None if got.state == "missing" else got.value)

    def read_page(self, name: str, size: int) -> Operation:
        """The bytes, of a file, are aligned for jax."""
        return self.read(name) if self.root is None else _PageFileRead(f"{self.root}/{name}", size)

    def write(self, name: str, data: bytes) -> Operation:
        return _Future(self._kv.write(name, data), lambda _: None)

    def delete(self, name: str) -> Operation:
        return _Future(self._kv.write(name, None), lambda _: None)

    def list(self, prefix: str = "") -> list[str]:
        """Names that start with `prefix`, in no order.

        Raises:
            ObjectError: the store cannot be listed.
        """
        bounds = ts.KvStore.KeyRange(prefix, _after(prefix)) if prefix else ts.KvStore.KeyRange()
        try:
            return [name.decode() for name in self._kv.list(bounds).result()]
        except (ValueError, OSError) as error:
            raise object_error(error) from error

    def delete_prefix(self, prefix: str) -> None:
        """Deletes all objects whose names start with `prefix`, which ends with a slash, and their directory.

        Raises:
            ObjectError: not all could be deleted.
        """
        try:
            if self.root is not None:  # TensorStore would leave directories and temporary files
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(self.root / prefix)
                return
            self._kv.delete_range(ts.KvStore.KeyRange(prefix, _after(prefix))).result()
        except (ValueError, OSError) as error:
            raise object_error(error) from error

    def read_generation(self, name: str) -> tuple[bytes | None, bytes]:
        """An object's bytes, None where it is missing, and the generation to give to `replace`."""
        try:
            got = self._kv.read(name).result()
        except (ValueError, OSError) as error:
            raise object_error(error) from error
        return (None if got.state == "missing" else got.value), got.stamp.generation

    def replace(self, name: str, data: bytes, generation: bytes) -> bytes | None:
        """Writes only if the object is still of `generation`; returns the new one, or None if it was not."""
        try:
            return self._kv.write(name, data, if_equal=generation).result().generation or None
        except (ValueError, OSError) as error:
            raise object_error(error) from error


def open_objects(location: str, *, sync: bool, context: ts.Context | None = None) -> KvObjects:
    """Opens a directory (a path or a file:// URL, made where it is missing), gs://, s3:// or memory:// URL.
    s3:// is at AWS, or where AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL say.

    Raises:
        ConfigError: names --l3-dir, and what is wrong with it.
    """
    try:
        spec, root = _spec(location, sync)
        if root is not None:
            root.mkdir(parents=True, exist_ok=True)
        return KvObjects(ts.KvStore.open(spec, context=context or ts.Context(_CONTEXT)).result(), root)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--l3-dir {location}: cannot be used: {error}") from error


def object_error(error: Exception) -> ObjectError:
    """What an error of TensorStore, which tells it in its text alone, or of the operating system means."""
    text = str(error)
    match = _OS_ERROR.search(text)
    number = int(match[1]) if match else getattr(error, "errno", None)
    if number in _NO_SPACE:
        reason = Reason.NO_SPACE
    elif number in _READ_ONLY or (number is None and text.startswith("PERMISSION_DENIED")):
        reason = Reason.READ_ONLY
    else:
        reason = Reason.IO
    return ObjectError(reason, text)


def _spec(location: str, sync: bool) -> tuple[dict[str, Any], Path | None]:
    scheme, separator, _ = location.partition("://")
    if not separator:
        return _file_spec(Path(location).expanduser().absolute(), sync)
    if scheme not in _SCHEMES:
        raise ValueError("a location is a path or one of " + ", ".join(f"{s}://" for s in _SCHEMES))
    if scheme == "file":
        return _file_spec(Path(unquote(urlsplit(location).path)), sync)
    spec = ts.KvStore.Spec(location).to_json()
    if scheme == "s3":
        spec |= _s3_endpoint()
    path = spec.get("path", "")
    # Names are appended to the path as they are.
    return {**spec, "path": path if not path or path.endswith("/") else f"{path}/"}, None


def _s3_endpoint() -> dict[str, str]:
    """The part of a spec that names an S3-compatible server; nothing for AWS itself."""
    for variable in _S3_ENDPOINTS:
        endpoint = os.environ.get(variable)
        if endpoint:
            if not endpoint.startswith(("http://", "https://")):
                raise ValueError(
                    f"${variable} is {endpoint!r}, must be http://HOST:PORT or https://HOST:PORT"
                )
            return {"endpoint": endpoint.rstrip("/")}
    return {}


def _file_spec(root: Path, sync: bool) -> tuple[dict[str, Any], Path]:
    # Without locking each write has a temporary name of its own and ends with a rename. TensorStore's locking
    # instead would reuse, untruncated, what a killed process left, and publish its tail.
    spec = {
        "driver": "file",
        "path": f"{root}/",
        "file_io_locking": {"mode": "none"},
        "file_io_sync": sync,
    }
    return spec, root


def _after(prefix: str) -> str:
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
