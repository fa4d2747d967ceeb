"""A jkv server or router as a process of its own, for benchmarks that start and restart it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import Sequence

from jkv.bench.clients import TargetError

_KEPT_LINES = 20
_STOP_S = 60.0  # a stop writes what is still pending


class EngineProcess:
    """`python -m jkv.serve`, or `jkv.router`, on a free port, in a session of its own: Ctrl-C reaches only
    the benchmark.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, flags: Sequence[str], module: str = "jkv.serve") -> tuple[EngineProcess, str]:
        """A server that is ready, and its address.

        Raises:
            TargetError: it ended instead; the message has its last lines.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", module, "--grpc-port", "0", *flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            start_new_session=True,
        )
        self = cls(process)
        try:
            address = await self._ready()
        except BaseException:
            await self.stop()
            raise
        self._drain_output()
        return self, address

    async def _ready(self) -> str:
        while line := await self._line():
            if line.startswith("ready: "):
                return line.split()[-1]
        status = await self._process.wait()
        raise TargetError(f"the server ended with status {status}:\n" + "\n".join(self._lines))

    async def stop(self) -> None:
        """Asks it to stop, waits, and ends whatever is left of it."""
        self._drain_output()
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_S)
            except TimeoutError:
                os.killpg(self._process.pid, signal.SIGKILL)
                await self._process.wait()

    def _drain_output(self) -> None:
        """Keeps the pipe from filling up, which would stop the server."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while await self._line():
            pass

    async def _line(self) -> str:
        """The next line of output with its end, "" after the last."""
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode(errors="replace")
        if line:
            self._lines.append(line.rstrip())
        return line
