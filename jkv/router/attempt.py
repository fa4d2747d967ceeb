"""One call to one engine: registered while it runs, its end turned into what it means for the request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import grpc

from jkv.router.engines import Sent
from jkv.router.failures import Failure, Kind, failure_of, lost


async def attempt(sent: Sent, call: Any, work: Coroutine[Any, Any, Failure | None]) -> Failure | None:
    """Do `work` with the call, and end the call whatever happens; returns why it did not end well."""
    engine = sent.engine
    sent.cancel = call.cancel
    engine.sent.add(sent)
    try:
        return await work
    except grpc.aio.AioRpcError as error:
        return failure_of(error)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not sent.moved or (task is not None and task.cancelling()):
            raise  # the client's doing
        return lost(f"engine {engine.id} was silent for too long")
    finally:
        call.cancel()
        engine.sent.discard(sent)


def count(sent: Sent, failure: Failure | None) -> Failure | None:
    """Keep account of successes and failures, for the requests that come after; returns the failure."""
    engine = sent.engine
    if failure is not None:
        engine.failures["silent" if sent.moved else failure.kind.value] += 1
    if sent.moved:
        return failure  # for its silence, by which it is known already
    if failure is None:
        engine.breaker.succeeded()
    elif failure.kind is Kind.FULL:
        engine.full_until = time.monotonic() + failure.retry_after_s
    elif failure.kind is not Kind.FINAL:
        engine.breaker.failed()
    return failure
