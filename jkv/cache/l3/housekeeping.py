"""What an owner does before it serves: removes what others left, and sees what its pages cost."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from jkv.cache.keys import FORMAT_VERSION
from jkv.cache.l3 import names
from jkv.cache.l3.format import StoreIdentity
from jkv.cache.l3.objects import KvObjects, ObjectError
from jkv.cache.l3.reasons import Reason

QUARANTINE_MAX = 4
# What a page's name takes in a directory of ext4, whose blocks may be half empty and never shrink (84 bytes,
# 108 while it is temporary), and its 16 bytes in the saved recency.
_NAME_BYTES = 272


def sweep(objects: KvObjects, owner: str) -> int:
    """Deletes temporary files of killed processes; returns how many. Only the holder of `owner` may do this.

    All of TensorStore's end with `__lock`, and it does not list them itself.
    """
    if objects.root is None:
        return 0
    removed = 0
    for directory, _, files in os.walk(objects.root / owner):
        for file in files:
            if file.endswith("__lock"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(directory, file))
                removed += 1
    return removed


def describe_model(objects: KvObjects, owner: str, identity: StoreIdentity) -> None:
    """Makes sure that the model's `about` is there; pages under another one of the same 8 digits go."""
    name, about = names.about(owner, identity.model8), _about(identity)
    found = objects.read(name).result()
    if found == about:
        return
    if found is not None and _object_bytes(found) is not None:
        objects.delete_prefix(names.model(owner, identity.model8))
    try:
        objects.write(name, about).result()
    except ObjectError as error:
        if error.reason is not Reason.NO_SPACE:  # evictions may yet make room
            raise


def other_models(
    objects: KvObjects, owner: str, identity: StoreIdentity, listed: Iterable[str]
) -> dict[str, int]:
    """Object sizes of the owner's other models that have pages. Those without pages are deleted, and those
    whose size cannot be told any more.
    """
    pages: dict[str, int] = {}
    for name in listed:
        parts = name.split("/")
        if len(parts) > 2 and parts[0] == owner and parts[1] not in (identity.model8, "quarantine"):
            pages[parts[1]] = pages.get(parts[1], 0) + (names.parse(name) is not None)
    sizes = {}
    for model8, count in pages.items():
        found = objects.read(names.about(owner, model8)).result()
        size = None if found is None else _object_bytes(found)
        if count and size is not None:
            sizes[model8] = size
        else:
            objects.delete_prefix(names.model(owner, model8))
    return sizes


class DiskCost:
    """What `du` says of objects: whole blocks on a file system, their bytes elsewhere."""

    def __init__(self, root: Path | None) -> None:
        self._block = None if root is None else max(os.statvfs(root).f_frsize, 1)

    def page(self, object_bytes: int) -> int:
        """One page, with its share of the directories and of the saved recency."""
        return object_bytes if self._block is None else self._whole(object_bytes) + _NAME_BYTES

    def overhead(self, object_bytes: int, models: int) -> int:
        """All else that one owner with pages of so many models keeps, at most."""
        if self._block is None:
            return QUARANTINE_MAX * object_bytes
        # The store, the owner, its quarantine, lock, budget and recency; each model's shards and `about`.
        blocks = 6 + models * (names.SHARDS + 2)
        return blocks * self._block + QUARANTINE_MAX * (self._whole(object_bytes) + _NAME_BYTES)

    def _whole(self, size: int) -> int:
        assert self._block is not None
        return -(-size // self._block) * self._block


def _about(identity: StoreIdentity) -> bytes:
    fields = {
        "format": FORMAT_VERSION,
        "model_root": identity.model_root.hex(),
        "kv_dtype": identity.kv_dtype,
        "page_shape": list(identity.page_shape),
        "page_size": identity.page_size,
        "object_bytes": identity.object_bytes,
    }
    return json.dumps(fields).encode()


def _object_bytes(about: bytes) -> int | None:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return int(json.loads(about)["object_bytes"])
    return None
