"""What a failed call to an engine means for its request: another engine, or the client. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

import grpc

from jkv.api.status import Status
from jkv.router.backoff import Backoff

_RETRY_AFTER = "retry-after-ms"
# Of one request: enough for engines that die together, but one that kills engines must not go through all.
_MOST_LOSSES = 5
_MOST_ERRORS = 2
_MOST_WAITS = 5
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0


class Kind(Enum):
    LOST = "lost"  # the engine or the way to it is gone, or it stops
    FULL = "full"
    ERROR = "error"  # it answered that it failed
    FINAL = "final"  # an answer to the client: another engine would say the same


_KINDS = {
    grpc.StatusCode.UNAVAILABLE: Kind.LOST,
    grpc.StatusCode.CANCELLED: Kind.LOST,  # not by us: as it stops
    grpc.StatusCode.INTERNAL: Kind.ERROR,
    grpc.StatusCode.UNKNOWN: Kind.ERROR,
    grpc.StatusCode.DATA_LOSS: Kind.ERROR,
    grpc.StatusCode.ABORTED: Kind.ERROR,
}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a call did not end well. `retry_after_s` is what a full engine said."""

    kind: Kind
    status: Status
    retry_after_s: float = 1.0


class UpstreamError(Exception):
    """A status that the client gets as the engine said it."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.details)
        self.status = status


def failure_of(error: grpc.aio.AioRpcError) -> Failure:
    """What a call's status says. Trailing metadata goes on to the client, but for gRPC's own."""
    metadata = tuple(
        (key, value)
        for key, value in error.trailing_metadata() or ()
        if isinstance(value, str) and (key == _RETRY_AFTER or key == "grpc-retry-pushback-ms")
    )
    status = Status(code=error.code(), details=error.details() or "", metadata=metadata)
    waits = [float(value) for key, value in metadata if key == _RETRY_AFTER]
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and waits:
        return Failure(kind=Kind.FULL, status=status, retry_after_s=waits[0] / 1000)
    return Failure(kind=_KINDS.get(error.code(), Kind.FINAL), status=status)


def lost(details: str) -> Failure:
    """An engine that ended a call without a reason of its own."""
    return Failure(kind=Kind.LOST, status=Status(code=grpc.StatusCode.UNAVAILABLE, details=details))


class Retries:
    """How one request may go on after failures: on which engines, how often, and when."""

    def __init__(self) -> None:
        self._backoff = Backoff(first=_FIRST_WAIT_S, most=_LONGEST_WAIT_S)
        self._losses = self._errors = self._waits = 0
        self._failed: set[str] = set()
        self._last: Failure | None = None
        self._full: set[str] = set()

    def prefer(self, names: Collection[str]) -> set[str]:
        """Of these engines those to choose from: no full ones, and failed ones only for want of others."""
        able = {name for name in names if name not in self._full}
        return able - self._failed or able

    def note(self, name: str, failure: Failure) -> float:
        """Count an engine's failure; returns how many seconds to wait before the next try.

        Raises:
            UpstreamError: the client has to know of this one.
        """
        self._last = failure
        if failure.kind is Kind.FULL:
            self._full.add(name)
            return 0.0
        self._errors += failure.kind is Kind.ERROR
        self._losses += failure.kind is Kind.LOST
        if failure.kind is Kind.FINAL or self._errors >= _MOST_ERRORS or self._losses >= _MOST_LOSSES:
            raise UpstreamError(failure.status)
        again = name in self._failed
        self._failed.add(name)
        return self._backoff.next() if again else 0.0

    def wait(self) -> float | None:
        """Seconds until the next look for an engine where there is none; None once that has been enough."""
        self._waits += 1
        return None if self._waits > _MOST_WAITS else self._backoff.next()
