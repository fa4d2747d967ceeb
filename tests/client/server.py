"""The real service in a thread, with a scripted engine and cache, for tests of its command-line client."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from jkv.api.grpc_server import GrpcServer
from jkv.api.prompt import Backend
from jkv.client import main
from jkv.engine.request import EngineRequest
from jkv.text.chat import ChatTemplate
from tests.api.doubles import ScriptedCache, ScriptedGenerator, ScriptedReplica, byte_tokenizer

_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


class Server:
    """The service in a thread; `generator` may be changed between calls."""

    def __init__(
        self, generator: ScriptedGenerator, cache: ScriptedCache, server: GrpcServer, port: int
    ) -> None:
        self.generator = generator
        self.cache = cache
        self.server = server
        self.address = f"127.0.0.1:{port}"

    @property
    def request(self) -> EngineRequest:
        return self.generator.requests[-1]


async def _start() -> Server:
    generator, cache, server = ScriptedGenerator(), ScriptedCache(), GrpcServer()
    port = await server.start("127.0.0.1", 0)
    backend = Backend(
        generator=generator,
        cache=cache,
        replica=ScriptedReplica(),
        served_name="bytes",
        tokenizer=byte_tokenizer(),
        chat_template=ChatTemplate(_TEMPLATE, None, None),
    )
    await server.open(backend)
    return Server(generator, cache, server, port)


@contextmanager
def running() -> Iterator[tuple[Server, asyncio.AbstractEventLoop]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(_start(), loop).result(10)
    try:
        yield server, loop
    finally:
        asyncio.run_coroutine_threadsafe(server.server.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


Capture = pytest.CaptureFixture[str]


def run_client(server: Server, *argv: str) -> int:
    return main([*argv, "--address", server.address])


def feed_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes, *, terminal: bool = False) -> None:
    stream = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdin", stream)
