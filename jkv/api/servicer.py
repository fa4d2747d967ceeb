"""The gRPC service: requests in, chunks out, every failure a status that says why."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar

import grpc

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.api.decode import Malformed
from jkv.api.prompt import Backend, prompt_ids
from jkv.api.sampling import stop_strings
from jkv.api.status import DeadlineError, GenerationError, abort
from jkv.api.stream import SequenceStream, merge
from jkv.api.validate import check_model, check_token_ids, engine_requests
from jkv.engine.request import EngineRequest, FinishReason
from jkv.errors import InvalidRequestError, ShuttingDownError
from jkv.text.detokenize import Detokenizer

R = TypeVar("R")
_Context = grpc.aio.ServicerContext[Any, Any]

_TEXT_THREADS = 4
# Tokenizing 10 MB takes seconds and up to 1.4 GiB: large prompts wait for each other, small ones for none.
_LARGE_BYTES = 2**20


def _answering(method: Callable[..., Awaitable[R]]) -> Callable[..., Awaitable[R]]:
    """Turn a handler's exceptions, and requests that could not be parsed, into statuses."""

    @functools.wraps(method)
    async def handle(self: GenerationServicer, request: Any, context: _Context) -> R:
        try:
            if isinstance(request, Malformed):
                raise InvalidRequestError(request.field, request.reason)
            return await method(self, request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await abort(context, error, getattr(request, "request_id", ""))

    return handle


class GenerationServicer(pb_grpc.GenerationServicer):
    """Answers UNAVAILABLE until `open()` and, for new work, after `close()`; requests that run go on.

    Methods run on one event loop; tokenizing happens in threads of its own.
    """

    def __init__(self) -> None:
        self._backend: Backend | None = None
        self._unavailable = "the model is still loading"
        self._live_ids: set[str] = set()
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._large = asyncio.Semaphore(1)
        self._threads = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="text")

    def open(self, backend: Backend) -> None:
        """Serve a model from now on."""
        self._backend = backend

    def close(self) -> None:
        """Take no new requests."""
        self._backend, self._unavailable = None, "the server is shutting down"

    async def idle(self) -> None:
        """Return once no Generate runs."""
        await self._idle.wait()

    @_answering
    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:
        backend = self._serving(request.model)
        deadline = _deadline(context)
        self._running += 1
        self._idle.clear()
        try:
            await self._generate(request, context, backend, deadline)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    @_answering
    async def Tokenize(self, request: pb.TokenizeRequest, context: _Context) -> pb.TokenizeResponse:
        backend = self._serving(request.model)
        return pb.TokenizeResponse(ids=await self._prompt_ids(request, backend))

    @_answering
    async def Detokenize(self, request: pb.DetokenizeRequest, context: _Context) -> pb.DetokenizeResponse:
        backend = self._serving(request.model)
        if backend.tokenizer is None:
            raise InvalidRequestError("ids", "this model has no tokenizer")
        check_token_ids("ids", request.ids, backend.generator.info.vocab_size)
        decode = functools.partial(
            backend.tokenizer.decode, list(request.ids), skip_special_tokens=request.skip_special_tokens
        )
        return pb.DetokenizeResponse(text=await self._in_thread(decode))

    @_answering
    async def ListModels(self, request: pb.ListModelsRequest, context: _Context) -> pb.ListModelsResponse:
        backend = self._serving("")
        info = backend.generator.info
        card = pb.ModelCard(
            name=backend.served_name,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            page_size=info.page_size,
            has_tokenizer=backend.tokenizer is not None,
        )
        return pb.ListModelsResponse(models=[card])

    def _serving(self, model: str) -> Backend:
        if self._backend is None:
            raise ShuttingDownError(self._unavailable)
        check_model(model, self._backend.served_name)
        return self._backend

    async def _prompt_ids(
        self, request: pb.GenerateRequest | pb.TokenizeRequest, backend: Backend
    ) -> tuple[int, ...]:
        if request.ByteSize() <= _LARGE_BYTES:
            return await self._in_thread(prompt_ids, request, backend)
        async with self._large:
            return await self._in_thread(prompt_ids, request, backend)

    async def _in_thread(self, function: Callable[..., R], *args: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def _generate(
        self, request: pb.GenerateRequest, context: _Context, backend: Backend, deadline: float | None
    ) -> None:
        stops = stop_strings(request.sampling, has_tokenizer=backend.tokenizer is not None)
        ids = await self._prompt_ids(request, backend)
        requests = engine_requests(
            request,
            ids,
            backend.generator.info,
            new_id=uuid.uuid4().hex,
            live_ids=self._live_ids,
            deadline=deadline,
        )
        sequences = [(one, _stream(one, index, stops, backend)) for index, one in enumerate(requests)]
        names = {one.request_id for one in requests}
        self._live_ids |= names
        try:
            async with aclosing(merge(backend.generator, sequences)) as chunks:
                async for chunk in chunks:
                    await context.write(chunk)
        finally:
            self._live_ids -= names
        _check_ends([stream for _, stream in sequences], deadline)


def _stream(request: EngineRequest, index: int, stops: tuple[str, ...], backend: Backend) -> SequenceStream:
    detokenizer = None
    if backend.tokenizer is not None:
        detokenizer = Detokenizer(backend.tokenizer, request.prompt_ids, skip_special_tokens=True)
    return SequenceStream(
        index=index, prompt_tokens=len(request.prompt_ids), detokenizer=detokenizer, stops=stops
    )


def _deadline(context: _Context) -> float | None:
    """The client's deadline in `time.monotonic()` seconds."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


def _check_ends(streams: list[SequenceStream], deadline: float | None) -> None:
    """Sequences that ended badly have said so in their last chunk; the status says it too."""
    late = deadline is not None and time.monotonic() >= deadline
    for stream in streams:
        if stream.finish_reason is FinishReason.ERROR:
            raise GenerationError(stream.error or "the engine failed without a reason")
        if stream.finish_reason is FinishReason.CANCELLED and late:
            raise DeadlineError("the deadline passed before the request was done")
