"""Seeded faults between the store and TensorStore, for tests. Off unless a test asks for them.

A test gives a plan to `PageStore.open`; one that starts a server process puts it into `JKV_TEST_L3_FAULTS` as
JSON, for example `{"seed": 1, "read_fail": 0.1, "write_slow": 1.0, "slow_s": 0.05}`, or names a file there,
which it may replace while the server runs.
"""

from __future__ import annotations

import errno
import json
import os
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from jkv.cache.l3.objects import ObjectError, Objects, Operation
from jkv.cache.l3.reasons import Reason

_VARIABLE = "JKV_TEST_L3_FAULTS"
_LOOK_S = 0.02


class Faults(Protocol):
    """Where plans come from."""

    @property
    def plan(self) -> FaultPlan:
        """The one in force now."""
        ...


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """Probabilities, each of an operation on a page; what happens to an operation depends on the seed alone
    and on how many came before it.
    """

    seed: int = 0
    read_fail: float = 0.0  # EIO
    read_short: float = 0.0  # the object's first half
    read_slow: float = 0.0
    write_fail: float = 0.0  # EIO
    write_full: float = 0.0  # ENOSPC
    write_short: float = 0.0  # publishes the object's first half and reports success
    write_slow: float = 0.0
    write_hang: float = 0.0  # publishes, and answers when another plan is in force
    delete_fail: float = 0.0  # EIO
    slow_s: float = 0.05

    @property
    def plan(self) -> FaultPlan:
        return self


class PlanFile:
    """The plan in a file, read again whenever the file has been replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._read: tuple[int, int] | None = None  # the file that `_plan` is from
        self._plan = FaultPlan()

    @property
    def plan(self) -> FaultPlan:
        with self._lock:
            status = self._path.stat()
            if (file := (status.st_ino, status.st_mtime_ns)) != self._read:
                self._plan = FaultPlan(**json.loads(self._path.read_text()))
                self._read = file
            return self._plan


def from_environment() -> Faults | None:
    """The faults that a test which started this process asks for, if any."""
    text = os.environ.get(_VARIABLE)
    if text is None:
        return None
    return FaultPlan(**json.loads(text)) if text.startswith("{") else PlanFile(Path(text))


class _Delayed:
    """An operation that goes wrong or takes its time."""

    def __init__(self, inner: Operation, delay_s: float, error: ObjectError | None, short: bool) -> None:
        self._inner, self._delay_s, self._error, self._short = inner, delay_s, error, short
        self._cancelled = threading.Event()

    def result(self) -> bytes | None:
        if self._cancelled.wait(self._delay_s):
            raise ObjectError(Reason.CANCELLED, "cancelled")
        if self._error is not None:
            raise self._error
        data = self._inner.result()
        return data[: len(data) // 2] if self._short and data is not None else data

    def cancel(self) -> None:
        self._cancelled.set()
        self._inner.cancel()


class _Hanging:
    """An operation whose answer is not told while a plan is in force."""

    def __init__(self, inner: Operation, faults: Faults, plan: FaultPlan) -> None:
        self._inner, self._faults, self._plan = inner, faults, plan

    def result(self) -> bytes | None:
        while self._faults.plan is self._plan:
            time.sleep(_LOOK_S)
        return self._inner.result()

    def cancel(self) -> None:
        """What hangs cannot be interrupted."""


class _Done:
    def result(self) -> None:
        return None

    def cancel(self) -> None:
        """It was never under way."""


class FaultyObjects:
    """Passes operations on to another store of objects, some of them badly."""

    def __init__(self, inner: Objects, faults: Faults) -> None:
        self._inner, self._faults = inner, faults
        self._random = random.Random(faults.plan.seed)
        self._lock = threading.Lock()

    def read_page(self, name: str, size: int) -> Operation:
        plan = self._faults.plan
        fail, short, slow = self._draw(plan.read_fail, plan.read_short, plan.read_slow)
        inner = _Done() if fail else self._inner.read_page(name, size)
        return _Delayed(inner, slow * plan.slow_s, _os_error(errno.EIO) if fail else None, short)

    def write(self, name: str, data: bytes) -> Operation:
        plan = self._faults.plan
        fail, full, short, slow, hang = self._draw(
            plan.write_fail, plan.write_full, plan.write_short, plan.write_slow, plan.write_hang
        )
        error = _os_error(errno.ENOSPC) if full else _os_error(errno.EIO) if fail else None
        inner = _Done() if error else self._inner.write(name, data[: len(data) // 2] if short else data)
        operation = _Delayed(inner, slow * plan.slow_s, error, short=False)
        return _Hanging(operation, self._faults, plan) if hang else operation

    def delete(self, name: str) -> Operation:
        (fail,) = self._draw(self._faults.plan.delete_fail)
        inner = _Done() if fail else self._inner.delete(name)
        return _Delayed(inner, 0.0, _os_error(errno.EIO) if fail else None, short=False)

    def _draw(self, *probabilities: float) -> list[bool]:
        with self._lock:
            return [self._random.random() < probability for probability in probabilities]


def _os_error(number: int) -> ObjectError:
    reason = Reason.NO_SPACE if number == errno.ENOSPC else Reason.IO
    return ObjectError(reason, f"[Errno {number}] {os.strerror(number)} (a test's fault)")
