"""A TCP relay between a client and a server, to be cut and held by tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Relay:
    """Forwards connections to `target` ("HOST:PORT") while it is open."""

    def __init__(self, target: str) -> None:
        host, port = target.split(":")
        self._target = (host, int(port))
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._cut = False
        self.address = ""

    def cut(self) -> None:
        """Ends all connections, and new ones as they come."""
        self._cut = True
        for writer in self._writers:
            writer.transport.abort()

    def mend(self) -> None:
        self._cut = False

    def hold(self) -> None:
        """Lets nothing through, and keeps what comes."""
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    async def serve(self) -> asyncio.Server:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            writer.transport.abort()
            return
        with contextlib.suppress(OSError):
            onward_reader, onward = await asyncio.open_connection(*self._target)
            both = {writer, onward}
            self._writers |= both
            try:
                await asyncio.gather(self._copy(reader, onward), self._copy(onward_reader, writer))
            finally:
                self._writers -= both
                onward.transport.abort()
        writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionError("the other end has closed")


@contextlib.asynccontextmanager
async def relay(target: str) -> AsyncIterator[Relay]:
    made = Relay(target)
    server = await made.serve()
    try:
        yield made
    finally:
        made.cut()
        made.release()
        server.close()
