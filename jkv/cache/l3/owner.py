"""Who may write where. An owner is an id kept in the store; one engine at a time holds it.

On a file system the hold is a `flock` on `<owner>/lock`: it ends with the process, however that ends, and
works between hosts where the file system's locks do (NFS since Linux 2.6.12). Object stores have no such
locks: there `<owner>/lock` is a lease that its holder renews, and conditional writes decide who gets it.
A holder that cannot renew stops writing when its lease has run out, by its own clock; another engine
takes the owner over `LEASE_S` later, by its clock. So two engines write under one owner only if a clock
is wrong by more than that, or a write was on its way for so long; pages being immutable and verified, the
worst of it is a page evicted by one that the other counts on, which is a miss.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from jkv.cache.l3 import names
from jkv.cache.l3.objects import KvObjects, ObjectError
from jkv.errors import ConfigError

LEASE_S = 60.0
ORPHANED_AFTER_S = 7 * 86_400.0

_log = logging.getLogger(__name__)


class Hold(Protocol):
    """One engine's hold of an owner."""

    @property
    def valid(self) -> bool:
        """False when another engine may have taken over, and nothing must be written."""
        ...

    def release(self) -> None: ...


class FileHold:
    """A flock on the owner's lock file; its mtime tells when the owner was last in use."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    @staticmethod
    def try_claim(root: Path, owner: str) -> FileHold | None:
        """None where a live process holds the owner.

        Raises:
            OSError: the lock cannot be made or locked at all.
        """
        path = root / names.lock(owner)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _same_file(path, descriptor):  # removed or replaced between open and lock
                os.close(descriptor)
                return None
            _describe_holder(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        return FileHold(path, descriptor)

    @property
    def valid(self) -> bool:
        """Claims the owner again where the store's directory was removed or replaced."""
        if _same_file(self._path, self._descriptor):
            return True
        try:
            again = FileHold.try_claim(self._path.parent.parent, self._path.parent.name)
        except OSError:
            return False
        if again is None:
            return False
        os.close(self._descriptor)
        self._descriptor = again._descriptor
        return True

    def release(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._descriptor)
        os.close(self._descriptor)


class LeaseHold:
    """A lease object, renewed by a thread."""

    def __init__(self, objects: KvObjects, owner: str, holder: str, generation: bytes) -> None:
        self._objects, self._name, self._holder = objects, names.lock(owner), holder
        self._generation = generation
        self._renewed = time.monotonic()
        self._lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="l3-lease", daemon=True)
        self._thread.start()

    @staticmethod
    def try_claim(objects: KvObjects, owner: str) -> LeaseHold | None:
        """None where another holder's lease still runs.

        Raises:
            ObjectError: the store cannot be read or written.
        """
        data, generation = objects.read_generation(names.lock(owner))
        if data is not None:
            current, renewed = _parse_lease(data)
            if current and time.time() - renewed < 2 * LEASE_S:
                return None
        holder = uuid.uuid4().hex
        new = _write_lease(objects, names.lock(owner), holder, generation)
        return None if new is None else LeaseHold(objects, owner, holder, new)

    @property
    def valid(self) -> bool:
        return not self._lost and time.monotonic() - self._renewed < LEASE_S

    def release(self) -> None:
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(ObjectError):
            self._objects.replace(self._name, _lease(""), self._generation)

    def _renew(self) -> None:
        while not self._stop.wait(LEASE_S / 3):
            started = time.monotonic()
            try:
                new = _write_lease(self._objects, self._name, self._holder, self._generation)
            except ObjectError as error:
                _log.warning("the L3 lease could not be renewed: %s", error)
                continue
            except Exception:
                _log.exception("the L3 lease could not be renewed")
                continue
            if new is None:
                _log.error("another engine took over this engine's L3 owner; nothing more is written")
                self._lost = True
                return
            self._generation, self._renewed = new, started


def claim(objects: KvObjects, owner: str | None, model8: str, listed: Iterable[str]) -> tuple[str, Hold]:
    """Holds the owner of this id or, for None, the store's free one that suits best, else a new one.

    Raises:
        ConfigError: names --l3-owner where it is no id or a running engine holds it.
        OSError, ObjectError: the store cannot be locked.
    """
    if owner is None:
        for candidate in [*_by_preference(model8, listed), uuid.uuid4().hex[:12]]:
            if (hold := _try_claim(objects, candidate)) is not None:
                return candidate, hold
        raise OSError("no owner could be claimed, not even a new one")
    if not names.OWNER.fullmatch(owner):
        raise ConfigError(
            f"--l3-owner {owner!r}: must be 1 to 64 letters, digits, '.', '_' or '-', not starting with '.'"
        )
    hold = _try_claim(objects, owner)
    if hold is None:
        raise ConfigError(
            f"--l3-owner {owner}: a running engine holds it; give another one, or none to take a free one"
        )
    return owner, hold


def collect_orphans(objects: KvObjects, listed: Iterable[str]) -> list[str]:
    """Deletes owners that nobody held for `ORPHANED_AFTER_S`, with all their pages; returns their ids."""
    collected = []
    for owner in {name.partition("/")[0] for name in listed if name.endswith("/lock")}:
        try:
            if time.time() - _last_held(objects, owner) < ORPHANED_AFTER_S:
                continue
            hold = _try_claim(objects, owner)
            if hold is None:
                continue
            objects.delete_prefix(f"{owner}/")
            hold.release()
            collected.append(owner)
        except (OSError, ObjectError) as error:
            _log.warning("the abandoned L3 owner %s could not be removed: %s", owner, error)
    return collected


def _try_claim(objects: KvObjects, owner: str) -> Hold | None:
    if objects.root is not None:
        return FileHold.try_claim(objects.root, owner)
    return LeaseHold.try_claim(objects, owner)


def _by_preference(model8: str, listed: Iterable[str]) -> list[str]:
    """The store's owners: those with most pages of this model first, then those with most of others, whose
    room counts as this engine's then.
    """
    objects: Counter[str] = Counter()
    pages: Counter[str] = Counter()
    for name in listed:
        owner, separator, rest = name.partition("/")
        objects[owner] += bool(separator)
        pages[owner] += rest.startswith(f"{model8}/")
    return sorted(+objects, key=lambda owner: (-pages[owner], -objects[owner], owner))


def _last_held(objects: KvObjects, owner: str) -> float:
    if objects.root is not None:
        return (objects.root / names.lock(owner)).stat().st_mtime
    data, _ = objects.read_generation(names.lock(owner))
    return time.time() if data is None else _parse_lease(data)[1]


def _write_lease(objects: KvObjects, name: str, holder: str, generation: bytes) -> bytes | None:
    """Writes a lease over that of `generation`; returns its own, or None where another one is there.

    A write may have been done although its answer was lost: then the next one, which TensorStore sends by
    itself, finds the holder's own lease.
    """
    new = objects.replace(name, _lease(holder), generation)
    if new is not None:
        return new
    data, found = objects.read_generation(name)
    return found if data is not None and _parse_lease(data)[0] == holder else None


def _lease(holder: str) -> bytes:
    return json.dumps({"holder": holder, "renewed": time.time()}).encode()


def _parse_lease(data: bytes) -> tuple[str, float]:
    """The holder, empty where it was released, and when it was renewed."""
    try:
        lease = json.loads(data)
        return str(lease["holder"]), float(lease["renewed"])
    except (ValueError, KeyError, TypeError):
        return "", 0.0


def _describe_holder(descriptor: int) -> None:
    """For people who look at the file; a full disk is no reason to fail."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{socket.gethostname()} {os.getpid()}\n".encode(), 0)


def _same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False
