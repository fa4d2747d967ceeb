"""The Generation service in front of all engines: chooses one, passes its answer on, goes on elsewhere."""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.api.serving import Context, Running, answering
from jkv.api.validate import check_input
from jkv.errors import NoEngineError, OverloadedError, ShuttingDownError
from jkv.router.answer import Answer
from jkv.router.attempt import attempt, count
from jkv.router.engines import Engine, Sent
from jkv.router.failures import Failure, Kind, Retries, UpstreamError, lost
from jkv.router.fleet import Fleet
from jkv.router.texts import Texts

log = logging.getLogger(__name__)

ENGINE_KEY = "jkv-engine"
_RETRY_AFTER_S = 1.0


class Stage(StrEnum):
    """How far an answer was when its engine failed."""

    BEFORE_FIRST_TOKEN = "before_first_token"
    MID_STREAM = "mid_stream"


class Chooser(Protocol):
    """Decides where requests go."""

    def choose(self, engines: Sequence[Engine], token_ids: Sequence[int], cache_salt: str | None) -> Sent:
        """Choose one, and count the request as sent to it until `finished`."""
        ...

    def first_token(self, sent: Sent) -> None:
        """The engine has computed the prompt."""
        ...

    def finished(self, sent: Sent) -> None: ...


class Proxy(pb_grpc.GenerationServicer):
    """Requests that run when it closes go on."""

    def __init__(self, fleet: Fleet, chooser: Chooser, texts: Texts, max_in_flight: int) -> None:
        self._fleet, self._chooser, self._texts = fleet, chooser, texts
        self._max_in_flight = max_in_flight
        self._running = Running()
        self._closed = False
        # Requests that another engine, or the same one, was asked to go on with.
        self.retries: Counter[Stage] = Counter()

    @property
    def running(self) -> int:
        """Generates in flight."""
        return self._running.count

    def close(self) -> None:
        """Take no new requests."""
        self._closed = True

    async def idle(self) -> None:
        """Return once no Generate runs."""
        await self._running.idle()

    @answering
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        self._admit()
        with self._running:
            try:
                await self._generate(request, context)
            except UpstreamError as error:
                status = error.status
                await context.abort(status.code, _as_asked(status.details, request), status.metadata)

    @answering
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        try:
            return pb.TokenizeResponse(ids=await self._texts.token_ids(request))
        except UpstreamError as error:
            return await context.abort(error.status.code, error.status.details, error.status.metadata)

    @answering
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        try:
            return await self._texts.ask("Detokenize", request, request.model)
        except UpstreamError as error:
            return await context.abort(error.status.code, error.status.details, error.status.metadata)

    @answering
    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        try:
            answers = [
                await self._texts.ask("ListModels", request, model) for model in self._fleet.models() or [""]
            ]
        except UpstreamError as error:
            return await context.abort(error.status.code, error.status.details, error.status.metadata)
        return pb.ListModelsResponse(models=[card for answer in answers for card in answer.models])

    def _admit(self) -> None:
        if self._closed:
            raise ShuttingDownError("the router is shutting down")
        if self._running.count >= self._max_in_flight:
            raise OverloadedError(
                f"{self._running.count} requests are in flight, which is --max-in-flight; try again later",
                _RETRY_AFTER_S,
            )

    async def _generate(self, request: pb.GenerateRequest, context: Context) -> None:
        check_input(request, has_tokenizer=True)
        ids = await self._texts.token_ids(request)
        answer = Answer(request, ids, new_id=uuid.uuid4().hex, seed=secrets.randbits(64))
        relay = _Relay(self._fleet, self._chooser, request, answer, context, self.retries)
        try:
            await relay.run(answer.indexes)
        except BaseExceptionGroup as group:  # of answers that went on apart
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            await relay.give_up()
            raise error from None
        except (UpstreamError, NoEngineError, OverloadedError):
            await relay.give_up()
            raise
        finally:
            context.set_trailing_metadata(tuple((ENGINE_KEY, one) for one in relay.served))


class _Relay:
    """One client's answers, from whichever engines they come."""

    def __init__(
        self,
        fleet: Fleet,
        chooser: Chooser,
        request: pb.GenerateRequest,
        answer: Answer,
        context: Context,
        retries: Counter[Stage],
    ) -> None:
        self._fleet, self._chooser, self._answer, self._context = fleet, chooser, answer, context
        self._retries = retries
        self._model, self._salt = request.model, None if request.no_cache else request.cache_salt
        self._writing = asyncio.Lock()
        self.served: list[str] = []  # engines that sent a part, in order

    async def run(self, part: Sequence[int]) -> None:
        """These answers to their ends, each on its own once one engine has failed with several.

        Raises:
            NoEngineError, OverloadedError: no engine takes it.
            UpstreamError: an engine's answer to the client, or its failure where no other may help.
        """
        retries = Retries()
        while True:
            sent = await self._choose(part, retries)
            failure = await self._attempt(sent, part)
            if failure is None:
                return
            if failure.kind is not Kind.FINAL:
                details = failure.status.details
                log.warning("request %s on %s: %s", self._answer.request_id, sent.engine.id, details)
            await asyncio.sleep(retries.note(sent.engine.name, failure))
            self._retries[Stage.MID_STREAM if self._answer.started else Stage.BEFORE_FIRST_TOKEN] += 1
            if self._answer.started and len(part) > 1:
                async with asyncio.TaskGroup() as group:
                    for index in self._answer.unfinished(part):
                        group.create_task(self.run((index,)))
                return

    async def give_up(self) -> None:
        """End what the client has begun to read with chunks that say so."""
        if self._answer.started:
            for chunk in self._answer.given_up(self._answer.indexes):
                await self._context.write(chunk)

    async def _choose(self, part: Sequence[int], retries: Retries) -> Sent:
        engines = await self._fleet.able(self._model, retries)
        return self._chooser.choose(engines, self._answer.tokens(part), self._salt)

    async def _attempt(self, sent: Sent, part: Sequence[int]) -> Failure | None:
        """Let one engine work on it; returns why it did not end well."""
        request = self._answer.request(part)
        if sent.peer is not None:
            request.peer.CopyFrom(sent.peer)
        call = sent.engine.generation.Generate(request, timeout=self._context.time_remaining())
        try:
            failure = await attempt(sent, call, self._pass_on(sent, part, call))
        finally:
            self._chooser.finished(sent)
        # What happened after the last chunk does not matter.
        return count(sent, failure if self._answer.unfinished(part) else None)

    async def _pass_on(self, sent: Sent, part: Sequence[int], call: Any) -> Failure | None:
        first = True
        async for chunk in call:
            if not self._answer.take(part, chunk):
                continue  # the status will say why
            if first:
                self._chooser.first_token(sent)
                first = False
            async with self._writing:
                await self._served_by(sent.engine)
                await self._context.write(chunk)
        return lost(f"engine {sent.engine.id} gave the request up")

    async def _served_by(self, engine: Engine) -> None:
        if not self.served:
            await self._context.send_initial_metadata(((ENGINE_KEY, engine.id),))
        if engine.id not in self.served:
            self.served.append(engine.id)


def _as_asked(details: str, request: pb.GenerateRequest) -> str:
    """An engine's words about `token_ids`, where the client sent another field."""
    field = request.WhichOneof("input") or "input"
    return f"{field}{details[len('token_ids') :]}" if details.startswith("token_ids") else details
