"""Keeps the index equal to what one engine holds, from its stream of events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

import grpc

from jkv.api import jkv_pb2 as pb
from jkv.cache.pages import Tier
from jkv.router.backoff import Backoff
from jkv.router.engines import Engine

log = logging.getLogger(__name__)

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0
_REFUSED_WAIT_S = 5.0  # it has to be restarted
_VOLATILE = (Tier.L1, Tier.L2)
_TIERS = {tier.value: tier for tier in Tier}


class Pages(Protocol):
    """What the index has of one engine. Keys are of 16 bytes each, back to back."""

    def update(self, tier: Tier, added: bytes, removed: bytes) -> None: ...
    def clear(self, tiers: tuple[Tier, ...]) -> None: ...


class GapError(Exception):
    """A change was lost, or came out of order: what the index has of this engine may be wrong."""


class RefusedError(Exception):
    """The engine does not fit the others."""


class Follower:
    """One engine's events into the index; `joined` is called when a new process of it is there in full."""

    def __init__(
        self,
        engine: Engine,
        pages: Pages,
        *,
        described: Callable[[pb.EngineDescription], str],
        joined: Callable[[], None],
    ) -> None:
        """`described` takes what an engine says of itself, or returns why it does not."""
        self._engine, self._pages = engine, pages
        self._described, self._joined = described, joined
        self._incarnation = ""  # of the view in the index, which may still lack parts
        self._pending: int | None = None  # the number of an event that has more parts
        self._process = ""  # that has joined

    async def run(self) -> None:
        """Follow until cancelled: again and again, with pauses, where the stream ends."""
        backoff = Backoff(first=_FIRST_WAIT_S, most=_LONGEST_WAIT_S)
        while True:
            heard = self._engine.heard
            try:
                await self._watch()
                self._lost("it ended its stream of events")
            except GapError as gap:
                # It goes on serving meanwhile: a view that is a little wrong costs time, not answers.
                log.warning("engine %s: %s; asking for a snapshot", self._engine.id, gap)
                self._engine.incarnation = ""
            except RefusedError as error:
                self._lost(str(error))
                self._pages.clear(tuple(Tier))
                await asyncio.sleep(_REFUSED_WAIT_S)
            except grpc.aio.AioRpcError as error:
                self._lost(" ".join((error.details() or error.code().name).split()))
            except Exception as error:  # events that nobody expected must not end the following
                log.exception("engine %s: its events cannot be followed", self._engine.id)
                self._lost(f"its events cannot be followed: {error}")
                self._engine.incarnation = ""
            if self._engine.heard == heard:
                self._pages.clear(_VOLATILE)  # nobody answers: with its process that memory has gone
                self._engine.incarnation = ""
            else:
                backoff.reset()
            await asyncio.sleep(backoff.next())

    def take(self, event: pb.WatchEvent, *, first: bool = False) -> None:
        """Apply one event.

        Raises:
            GapError: it does not follow the one before it.
            RefusedError: it is the first of its stream, and the engine cannot be used.
        """
        engine = self._engine
        engine.heard = time.monotonic()
        if first:
            engine.refused = self._described(event.engine)
            if engine.refused:
                raise RefusedError(engine.refused)
        if event.HasField("load"):
            engine.load = event.load
            engine.loads.take(event.load)
        if event.reset:
            self._pages.clear(tuple(Tier))
            self._incarnation, engine.incarnation = event.incarnation, ""
        else:
            self._check_order(event)
        for change in event.changes:
            if change.tier in _TIERS:
                self._pages.update(_TIERS[change.tier], change.added, change.removed)
        self._pending = event.number if event.partial else None
        if not event.partial:
            engine.incarnation, engine.number, engine.synced = event.incarnation, event.number, True
            self._join(event.incarnation)

    async def _watch(self) -> None:
        engine = self._engine
        self._pending, self._incarnation = None, engine.incarnation
        request = pb.WatchRequest(incarnation=engine.incarnation, after=engine.number)
        call = engine.replica.Watch(request if engine.incarnation else pb.WatchRequest())
        first = True
        try:
            async for event in call:
                self.take(event, first=first)
                first = False
        finally:
            call.cancel()

    def _check_order(self, event: pb.WatchEvent) -> None:
        if event.incarnation != self._incarnation:
            raise GapError(f"changes of incarnation {event.incarnation!r} came without a snapshot")
        known = self._engine.number
        expected = known + bool(event.changes) if self._pending is None else self._pending
        if event.number != expected:
            raise GapError(f"change {event.number} came after {known if self._pending is None else expected}")

    def _join(self, incarnation: str) -> None:
        if incarnation != self._process:
            self._process = incarnation
            self._engine.started()
            self._joined()

    def _lost(self, why: str) -> None:
        if self._engine.synced:
            log.warning("engine %s at %s is gone: %s", self._engine.id, self._engine.address, why)
        self._engine.disconnected(why)
