"""A proxy in front of an engine that passes every call on, and loses, holds back and swaps its events."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import grpc

from jkv.api import jkv_pb2 as pb

_WATCH = "/jkv.v1.Replica/Watch"
_LATE_S = 0.3


class Meddler(grpc.GenericRpcHandler):
    """`meddling` may be changed while it serves; `done` counts what was done to events."""

    def __init__(self, target: str, seed: int) -> None:
        self.meddling = False
        self.done: Counter[str] = Counter()
        self.address = ""
        self._target, self._chance = target, random.Random(seed)

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method

        async def handle(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
            call: Any = self._channel.unary_stream(method)(request, timeout=context.time_remaining())
            try:
                async for message in self._meddle(call) if method == _WATCH else call:
                    yield message
            except grpc.aio.AioRpcError as error:
                await context.abort(
                    error.code(), error.details() or "", tuple(error.trailing_metadata() or ())
                )
            finally:
                call.cancel()

        # A unary answer is a stream of one message.
        return grpc.unary_stream_rpc_method_handler(handle)

    async def _meddle(self, events: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Does the same to all parts of an event: the network keeps those of one stream together."""
        parts: list[bytes] = []
        held: list[bytes] = []
        async for message in events:
            parsed = pb.WatchEvent.FromString(message)
            parts.append(message)
            if parsed.partial:
                continue
            event, parts = parts, []
            what = "passed"
            if self.meddling and parsed.changes and not pb.WatchEvent.FromString(event[0]).reset:
                what = self._chance.choice(("lost", "late", "swapped", "passed"))
                self.done[what] += 1
            if what == "late":
                await asyncio.sleep(_LATE_S)
            if what == "swapped" and not held:
                held = event
            elif what != "lost":
                for part in event + held:
                    yield part
                held = []

    async def serve(self, until: asyncio.Event, started: threading.Event) -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        async with grpc.aio.insecure_channel(self._target) as self._channel:
            await server.start()
            started.set()
            await until.wait()
            await server.stop(None)


@contextlib.contextmanager
def meddling_with(targets: list[str], seed: int) -> Iterator[list[Meddler]]:
    """One for each engine, on an event loop of their own."""
    meddlers = [Meddler(target, seed + number) for number, target in enumerate(targets)]
    loop, ended, started = asyncio.new_event_loop(), asyncio.Event(), [threading.Event() for _ in targets]

    async def serve() -> None:
        async with asyncio.TaskGroup() as group:
            for meddler, event in zip(meddlers, started, strict=True):
                group.create_task(meddler.serve(ended, event))

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="meddlers")
    thread.start()
    try:
        for event in started:
            event.wait()
        yield meddlers
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()
