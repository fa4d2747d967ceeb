"""Which gRPC status each error becomes."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from jkv.errors import (
    FailedPreconditionError,
    InvalidRequestError,
    NoEngineError,
    OverloadedError,
    PermissionDeniedError,
    ShuttingDownError,
    UnknownModelError,
)

log = logging.getLogger(__name__)


class DeadlineError(Exception):
    """The client's deadline passed before the request was done."""


class GenerationError(Exception):
    """The engine ended a request with an error of its own."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """A gRPC status with its trailing metadata."""

    code: grpc.StatusCode
    details: str
    metadata: tuple[tuple[str, str], ...] = ()


def status_of(error: Exception) -> Status:
    """The status for an error that a handler raised; one that nobody expected is INTERNAL."""
    match error:
        case UnknownModelError():
            return Status(code=grpc.StatusCode.NOT_FOUND, details=str(error))
        case InvalidRequestError():
            return Status(code=grpc.StatusCode.INVALID_ARGUMENT, details=str(error))
        case OverloadedError():
            # The second key is gRPC's own: clients with a retry policy wait that long.
            wait = str(max(1, math.ceil(error.retry_after_s * 1000)))
            metadata = (("retry-after-ms", wait), ("grpc-retry-pushback-ms", wait))
            return Status(code=grpc.StatusCode.RESOURCE_EXHAUSTED, details=str(error), metadata=metadata)
        case FailedPreconditionError():
            return Status(code=grpc.StatusCode.FAILED_PRECONDITION, details=str(error))
        case PermissionDeniedError():
            return Status(code=grpc.StatusCode.PERMISSION_DENIED, details=str(error))
        case ShuttingDownError() | NoEngineError():
            return Status(code=grpc.StatusCode.UNAVAILABLE, details=str(error))
        case DeadlineError():
            return Status(code=grpc.StatusCode.DEADLINE_EXCEEDED, details=str(error))
        case GenerationError():
            return Status(code=grpc.StatusCode.INTERNAL, details=str(error))
        case _:
            details = f"unexpected {type(error).__name__}; the server's log has the traceback"
            return Status(code=grpc.StatusCode.INTERNAL, details=details)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception, request_id: str) -> NoReturn:
    """End an RPC with the error's status; an unexpected error is logged with its traceback."""
    status = status_of(error)
    if status.code is grpc.StatusCode.INTERNAL:
        log.error("request %s failed", request_id or "-", exc_info=error)
    return await context.abort(status.code, status.details, status.metadata)
