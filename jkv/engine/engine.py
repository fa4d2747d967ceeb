"""The engine as asyncio code sees it: `Generator` over the engine's thread."""

from __future__ import annotations

import asyncio
import time

from jkv.engine.cache_admin import CacheAdmin
from jkv.engine.cache_control import EngineCache
from jkv.engine.loop import EngineLoop
from jkv.engine.outbox import Reader
from jkv.engine.replica import EngineReplica
from jkv.engine.request import EngineInfo, EngineRequest, Sink, TokenOutput
from jkv.engine.stats import EngineStats
from jkv.errors import InvalidRequestError

_POLL_S = 0.05


class Engine:
    """Implements `jkv.engine.request.Generator`. Safe to use from several event loops."""

    def __init__(self, info: EngineInfo, loop: EngineLoop, replica: EngineReplica) -> None:
        self._info, self._loop, self._replica = info, loop, replica
        admin = CacheAdmin(loop.scheduler, loop.transfers, replica.page_bytes)
        self._cache = EngineCache(loop, admin, info.page_size)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def cache(self) -> EngineCache:
        return self._cache

    @property
    def replica(self) -> EngineReplica:
        return self._replica

    @property
    def stats(self) -> EngineStats:
        return self._loop.stats

    def start(self) -> None:
        """Starts the engine's thread."""
        self._loop.start()

    async def generate(self, request: EngineRequest, sink: Sink) -> None:
        """See `Generator.generate`."""
        self._check(request)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        finished = False

        def take(output: TokenOutput) -> None:
            nonlocal finished
            finished = output.finish_reason is not None
            if done.done():
                return  # nobody wants what was on its way
            try:
                if sink(output) or finished:
                    done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        ticket = self._loop.submit(request, Reader(loop=loop, take=take))
        try:
            await done
        finally:
            if not finished:
                self._loop.abort(ticket)

    async def ended(self) -> None:
        """Returns when the engine has stopped; without `drain`, that is a failure it did not survive."""
        # Shielded, for a caller that gives up must not settle what others wait for.
        await asyncio.shield(asyncio.wrap_future(self._loop.ended))

    async def drain(self, timeout: float) -> None:
        """Takes no new requests, waits up to `timeout` seconds for those that run, cancels the rest and
        stops.
        """
        self._loop.close()
        deadline = time.monotonic() + timeout
        while self._loop.alive and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        await asyncio.to_thread(self._loop.stop)

    def _check(self, request: EngineRequest) -> None:
        length = len(request.prompt_ids) + request.sampling.max_tokens
        for limit, name in (
            (self._info.max_model_len, "max-model-len"),
            (self._info.max_tokens_in_l1, "the L1 cache's size in tokens"),
        ):
            if length > limit:
                raise InvalidRequestError(
                    "max_tokens",
                    f"{len(request.prompt_ids)} prompt tokens and max_tokens {request.sampling.max_tokens} "
                    f"make {length}; {name} is {limit}",
                )
