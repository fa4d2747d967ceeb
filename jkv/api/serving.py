"""What the services of one server share: the model behind them, threads for text, and how calls fail."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc

from jkv.api.decode import Malformed
from jkv.api.prompt import Backend, PromptRequest, prompt_ids
from jkv.api.status import abort
from jkv.api.validate import check_model
from jkv.errors import InvalidRequestError, ShuttingDownError

R = TypeVar("R")
Context = grpc.aio.ServicerContext[Any, Any]

_TEXT_THREADS = 4
# Tokenizing 10 MB takes seconds and up to 1.4 GiB: large prompts wait for each other, small ones for none.
_LARGE_BYTES = 2**20


def answering(method: Callable[..., Awaitable[R]]) -> Callable[..., Awaitable[R]]:
    """Turn a handler's exceptions, and requests that could not be parsed, into statuses.

    Where the client has gone and nothing can be sent any more, the handler ends as cancelled.
    """

    @functools.wraps(method)
    async def handle(self: Any, request: Any, context: Context) -> R:
        try:
            if isinstance(request, Malformed):
                raise InvalidRequestError(request.field, request.reason)
            return await method(self, request, context)
        except grpc.aio.AbortError:
            raise
        except grpc.aio.InternalError:  # of a write that found the call ended, before gRPC cancelled it
            raise asyncio.CancelledError from None
        except Exception as error:
            await abort(context, error, getattr(request, "request_id", ""))

    return handle


class Running:
    """How many requests run, and when none does. Owner: one event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> None:
        self.count += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self.count -= 1
        if not self.count:
            self._idle.set()

    async def idle(self) -> None:
        """Return once none runs."""
        await self._idle.wait()


class Serving:
    """The model that is served, between `open()` and `close()`; there is none before and after.

    Its methods run on one event loop; tokenizing happens in threads of its own.
    """

    def __init__(self) -> None:
        self._backend: Backend | None = None
        self._unavailable = "the model is still loading"
        self._large = asyncio.Semaphore(1)
        self._threads = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="text")

    def open(self, backend: Backend) -> None:
        """Serve a model from now on."""
        self._backend = backend

    def close(self) -> None:
        """Take no new requests."""
        self._backend, self._unavailable = None, "the server is shutting down"

    def backend(self, model: str = "") -> Backend:
        """The one that serves `model`, where "" is any.

        Raises:
            ShuttingDownError: none does yet, or any more.
            UnknownModelError: it serves another model.
        """
        if self._backend is None:
            raise ShuttingDownError(self._unavailable)
        check_model(model, self._backend.served_name)
        return self._backend

    async def prompt_ids(self, request: PromptRequest, backend: Backend) -> tuple[int, ...]:
        """See `jkv.api.prompt.prompt_ids`."""
        if request.ByteSize() <= _LARGE_BYTES:
            return await self.in_thread(prompt_ids, request, backend)
        async with self._large:
            return await self.in_thread(prompt_ids, request, backend)

    async def in_thread(self, function: Callable[..., R], *args: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)
