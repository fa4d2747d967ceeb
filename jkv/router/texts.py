"""Token ids and text, by asking an engine: a router has no tokenizer of its own. It keeps ids for a while."""

from __future__ import annotations

import asyncio
from typing import Any

from jkv.api import jkv_pb2 as pb
from jkv.api.validate import PromptRequest, check_input
from jkv.router.attempt import attempt, count
from jkv.router.engines import Sent
from jkv.router.failures import Failure, Retries
from jkv.router.fleet import Fleet
from jkv.router.tokens import TokenCache


class Texts:
    """Asks whichever engine has the least to do. Raises what `Fleet.able` does, and UpstreamError."""

    def __init__(self, fleet: Fleet, cache: TokenCache) -> None:
        self._fleet, self._cache = fleet, cache

    async def token_ids(self, request: PromptRequest) -> list[int]:
        """The input of a request as token ids.

        Raises:
            InvalidRequestError: no usable input.
        """
        field = check_input(request, has_tokenizer=True)
        if not isinstance(request, pb.TokenizeRequest) and field == "token_ids":
            return list(request.token_ids.ids)
        asked = pb.TokenizeRequest(model=request.model)
        if field == "prompt":
            asked.prompt = request.prompt
        else:
            asked.messages.CopyFrom(request.messages)
        key = self._root(request.model) + asked.SerializeToString(deterministic=True)
        ids = self._cache.get(key)
        if ids is None:
            ids = list((await self.ask("Tokenize", asked, request.model)).ids)
            self._cache.put(key, ids)
        return ids

    async def ask(self, method: str, request: Any, model: str) -> Any:
        """The answer of an engine of this model to a call of the Generation service."""
        retries, answers = Retries(), []
        while True:
            engine = min(await self._fleet.able(model, retries), key=lambda one: len(one.sent))
            call = getattr(engine.generation, method)(request)

            async def work(call: Any = call) -> Failure | None:
                answers.append(await call)
                return None

            sent = Sent(engine=engine)
            failure = count(sent, await attempt(sent, call, work()))
            if failure is None:
                return answers[0]
            await asyncio.sleep(retries.note(engine.name, failure))

    def _root(self, model: str) -> bytes:
        """Engines with one model root have one tokenizer, or so their weights say."""
        description = self._fleet.of_model(model)[0].description
        assert description is not None, "of_model has those that gave one"
        return description.model_root
