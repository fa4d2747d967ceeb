"""The engines of a cluster, each followed by a task of its own, and which of them may get a request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from jkv.api import jkv_pb2 as pb
from jkv.errors import InvalidRequestError, NoEngineError, OverloadedError, UnknownModelError
from jkv.router.engines import Engine, EngineState, settle
from jkv.router.failures import Retries
from jkv.router.follow import Follower, Pages

log = logging.getLogger(__name__)

_TICK_S = 0.1


class Fleet:
    """Engines by name: their ids in etcd, or their addresses. Owner: the event loop."""

    def __init__(
        self,
        *,
        silence: float,
        pages: Callable[[Engine], Pages],
        forget: Callable[[Engine], None],
        self_test: Callable[[Engine], Coroutine[Any, Any, None]],
    ) -> None:
        """`pages` makes the index's part for an engine, `forget` drops it; `self_test` runs as one joins."""
        self._silence, self._pages, self._forget, self._self_test = silence, pages, forget, self_test
        self._engines: dict[str, Engine] = {}
        self._tasks: dict[Engine, set[asyncio.Task[None]]] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def engines(self) -> list[Engine]:
        return list(self._engines.values())

    @property
    def is_serving(self) -> bool:
        return any(engine.state is EngineState.SERVING for engine in self._engines.values())

    def set_members(self, addresses: Mapping[str, str]) -> None:
        """The engines that there are now, by name. Requests of those that left run on."""
        for name, engine in list(self._engines.items()):
            if addresses.get(name) != engine.address:
                del self._engines[name]
                self._spawn(self._leave(engine))
        for name, address in addresses.items():
            if name not in self._engines:
                self._join(Engine(address=address, name=name, silence=self._silence))

    def of_model(self, model: str) -> list[Engine]:
        """The engines of a model, where "" is the only one, whatever their state.

        Raises:
            NoEngineError: no engine has said yet what it serves.
            UnknownModelError: none serves this one.
            InvalidRequestError: there are several to choose from.
        """
        models = self.models()
        if not models:
            raise NoEngineError(f"no engine serves: {self._troubles(self.engines)}")
        names = ", ".join(models)
        if model and model not in models:
            raise UnknownModelError("model", f"{model!r} is not served here; this cluster has {names}")
        if not model and len(models) > 1:
            raise InvalidRequestError("model", f"is required where several are served: {names}")
        return [engine for engine in self.engines if engine.model in ([model] if model else models)]

    async def able(self, model: str, retries: Retries) -> list[Engine]:
        """Those of a model that a request may be sent to: failing ones only where no other is left.

        Waits a moment for engines that were there a moment ago.

        Raises:
            NoEngineError: there is none; says of each engine why.
            OverloadedError: all of them are full.
            UnknownModelError, InvalidRequestError: see `of_model`.
        """
        while True:
            try:
                usable = self._usable(model)
            except NoEngineError:
                lately = any(engine.lag_s < self._silence for engine in self.engines)
                if not lately or (delay := retries.wait()) is None:
                    raise
                await asyncio.sleep(delay)
                continue
            now = time.monotonic()
            names = retries.prefer({engine.name for engine in usable if engine.full_until <= now})
            if names:
                return [engine for engine in usable if engine.name in names]
            wait = min(max(engine.full_until - now, 0.0) for engine in usable)
            raise OverloadedError(f"all engines that serve are full ({len(usable)}); try again later", wait)

    def candidates(self, model: str) -> list[Engine]:
        """As `able`, but without waiting, and without counting as a try of failing engines.

        Raises:
            NoEngineError, UnknownModelError, InvalidRequestError: see there.
        """
        engines = self.of_model(model)
        for state in (EngineState.SERVING, EngineState.FAILING):
            if found := [engine for engine in engines if engine.state is state]:
                return found
        raise NoEngineError(f"no engine serves: {self._troubles(engines)}")

    def models(self) -> list[str]:
        """The names that engines have given, also those that are gone for now."""
        return sorted({engine.model for engine in self.engines if engine.description is not None})

    def _usable(self, model: str) -> list[Engine]:
        """The candidates, or a failing engine that it is time to try."""
        failing = (engine for engine in self.of_model(model) if engine.state is EngineState.FAILING)
        probe = next((engine for engine in failing if engine.breaker.allows()), None)
        return self.candidates(model) if probe is None else [probe]

    async def watch_silence(self) -> None:
        """Take requests away from engines that stay silent, where others can go on with them."""
        while True:
            await asyncio.sleep(_TICK_S)
            for engine in self.engines:
                others = [e for e in self.engines if e.model == engine.model and e is not engine]
                if engine.lag_s < 2 * engine.silence or not engine.sent:
                    continue
                if any(other.state is EngineState.SERVING for other in others):
                    log.warning("%s; %d requests go on elsewhere", engine.trouble, len(engine.sent))
                    for sent in list(engine.sent):
                        sent.moved = True
                        sent.cancel()

    async def close(self) -> None:
        """Stop following, and close all connections."""
        for engine in self.engines:
            await self._stop(engine)
            await engine.close()
        for task in list(self._leaving):
            await settle(task)

    def _join(self, engine: Engine) -> None:
        self._engines[engine.name] = engine
        follower = Follower(
            engine,
            self._pages(engine),
            described=lambda description: self._describe(engine, description),
            joined=lambda: self._start(engine, self._self_test(engine)),
        )
        self._start(engine, follower.run())

    def _start(self, engine: Engine, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        tasks = self._tasks.setdefault(engine, set())
        tasks.add(task)
        task.add_done_callback(lambda done: _ended(done, tasks))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._leaving.add(task)
        task.add_done_callback(lambda done: _ended(done, self._leaving))

    async def _leave(self, engine: Engine) -> None:
        log.info("engine %s at %s has left", engine.id, engine.address)
        await self._stop(engine)
        try:
            while engine.sent:
                await asyncio.sleep(_TICK_S)
        finally:
            await engine.close()

    async def _stop(self, engine: Engine) -> None:
        for task in list(self._tasks.pop(engine, ())):
            await settle(task)
        self._forget(engine)

    def _describe(self, engine: Engine, description: pb.EngineDescription) -> str:
        """Take what an engine says of itself; why not, or ""."""
        if not description.id or not description.model:
            return "it does not say who it is: another version of jkv"
        for other in self.engines:
            known = other.description
            if other is engine or known is None or not other.synced:
                continue
            if known.id == description.id:
                return f"{other.address} has the --instance-id {known.id!r} already"
            if known.model == description.model and (refusal := _difference(description, known)):
                return refusal
        engine.description = description
        return ""

    @staticmethod
    def _troubles(engines: list[Engine]) -> str:
        return "; ".join(engine.trouble for engine in engines) or "none has joined the cluster"


def _difference(one: pb.EngineDescription, other: pb.EngineDescription) -> str:
    """Why two engines of one model cannot use each other's pages, or ""."""
    if one.page_size != other.page_size:
        return f"--page-size {one.page_size}, but {other.id} has {other.page_size}"
    if one.model_root != other.model_root:
        return (
            f"model root {one.model_root.hex()}, but {other.id} has {other.model_root.hex()}: other weights, "
            "dtype or page format under the same name"
        )
    return ""


def _ended(task: asyncio.Task[None], tasks: set[asyncio.Task[None]]) -> None:
    tasks.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a task of the router failed", exc_info=error)
