"""How a server's process tells what it does, and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import NoReturn, TypeVar

T = TypeVar("T")


def announce(message: str) -> None:
    """For people and scripts that wait for the server."""
    print(message, flush=True)


def stop_on_signals() -> asyncio.Event:
    """Set on the first SIGTERM or SIGINT; a second one ends the process at once."""
    stopping = asyncio.Event()

    def handle(number: int) -> None:
        if stopping.is_set():
            exit_now(128 + number)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    return stopping


def exit_now(status: int) -> NoReturn:
    """Leave without waiting for threads that compile or load."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


async def unless(stopping: asyncio.Event, work: asyncio.Future[T]) -> T | None:
    """The work's result, or None if `stopping` comes first."""
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if work.done():
        return work.result()
    work.cancel()
    return None
