"""A TCP relay between a client and a server, to be cut, held and slowed down by tests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator


class Relay:
    """Forwards connections to `target` ("HOST:PORT") while it is open, `delay_s` later."""

    def __init__(self, target: str) -> None:
        host, port = target.split(":")
        self._target = (host, int(port))
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._cut = False
        self.delay_s = 0.0
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
        """Reads on while what came before is still under way, as a long line does."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        now = asyncio.get_running_loop().time

        async def deliver() -> None:
            while True:
                due, data = await under_way.get()
                await asyncio.sleep(due - now())
                await self._open.wait()
                writer.write(data)
                await writer.drain()

        delivering = asyncio.create_task(deliver())
        try:
            while data := await reader.read(65536):
                under_way.put_nowait((now() + self.delay_s, data))
            raise ConnectionError("the other end has closed")
        finally:
            delivering.cancel()


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


class RelayThread:
    """A relay with a thread of its own, for tests without an event loop."""

    def __init__(self, target: str) -> None:
        self._relay = Relay(target)
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay")
        self._thread.start()
        self._started.wait()

    @property
    def address(self) -> str:
        return self._relay.address

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self._relay.cut)

    def mend(self) -> None:
        self._loop.call_soon_threadsafe(self._relay.mend)

    def slow_down(self, delay_s: float) -> None:
        self._loop.call_soon_threadsafe(setattr, self._relay, "delay_s", delay_s)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await self._relay.serve()
        self._started.set()
        await self._ended.wait()
        self._relay.cut()
        server.close()
        if connections := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(connections, timeout=5)


@contextlib.contextmanager
def relay_in_thread(target: str) -> Iterator[RelayThread]:
    made = RelayThread(target)
    try:
        yield made
    finally:
        made.close()
