"""The Generation service: requests in, chunks out, every failure a status that says why."""

from __future__ import annotations

import functools
import time
import uuid
from contextlib import aclosing

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.api.prompt import Backend
from jkv.api.sampling import stop_strings
from jkv.api.serving import Context, Running, Serving, answering
from jkv.api.status import DeadlineError, GenerationError
from jkv.api.stream import SequenceStream, merge
from jkv.api.validate import check_token_ids, engine_requests
from jkv.engine.request import EngineRequest, FinishReason
from jkv.errors import InvalidRequestError
from jkv.text.detokenize import Detokenizer


class GenerationServicer(pb_grpc.GenerationServicer):
    """Answers UNAVAILABLE while `serving` has no model; requests that run when it closes go on."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._live_ids: set[str] = set()
        self._running = Running()

    async def idle(self) -> None:
        """Return once no Generate runs."""
        await self._running.idle()

    @answering
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        backend = self._serving.backend(request.model)
        deadline = _deadline(context)
        with self._running:
            await self._generate(request, context, backend, deadline)

    @answering
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        backend = self._serving.backend(request.model)
        return pb.TokenizeResponse(ids=await self._serving.prompt_ids(request, backend))

    @answering
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        backend = self._serving.backend(request.model)
        if backend.tokenizer is None:
            raise InvalidRequestError("ids", "this model has no tokenizer")
        check_token_ids("ids", request.ids, backend.generator.info.vocab_size)
        decode = functools.partial(
            backend.tokenizer.decode, list(request.ids), skip_special_tokens=request.skip_special_tokens
        )
        return pb.DetokenizeResponse(text=await self._serving.in_thread(decode))

    @answering
    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        backend = self._serving.backend()
        info = backend.generator.info
        card = pb.ModelCard(
            name=backend.served_name,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            page_size=info.page_size,
            has_tokenizer=backend.tokenizer is not None,
        )
        return pb.ListModelsResponse(models=[card])

    async def _generate(
        self, request: pb.GenerateRequest, context: Context, backend: Backend, deadline: float | None
    ) -> None:
        stops = stop_strings(request.sampling, has_tokenizer=backend.tokenizer is not None)
        ids = await self._serving.prompt_ids(request, backend)
        requests = engine_requests(
            request,
            ids,
            backend.generator.info,
            new_id=uuid.uuid4().hex,
            live_ids=self._live_ids,
            deadline=deadline,
        )
        sequences = [(one, _stream(one, index, stops, backend)) for index, one in enumerate(requests)]
        for one, stream in sequences:
            stream.resume(one, backend.generator.info.eos_token_ids)
        if all(stream.finish_reason is not None for _, stream in sequences):
            for _, stream in sequences:
                for chunk in stream.take():
                    await context.write(chunk)
            return
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


def _deadline(context: Context) -> float | None:
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
