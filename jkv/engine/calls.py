"""Asking the engine's thread from asyncio code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from jkv.engine.loop import EngineLoop
from jkv.errors import ShuttingDownError

R = TypeVar("R")
_POLL_S = 0.05


async def ask(loop: EngineLoop, function: Callable[[], R]) -> R:
    """The function's result, called on the engine's thread.

    Raises:
        ShuttingDownError: the engine has ended before.
    """
    return await settled(loop, loop.call(lambda future: future.set_result(function())))


async def settled(loop: EngineLoop, future: Future[R]) -> R:
    """The result of a future that `loop.call` made.

    Raises:
        ShuttingDownError: the engine has ended before there was one.
    """
    waiting = asyncio.wrap_future(future)
    while loop.running:
        await asyncio.wait([waiting], timeout=_POLL_S)
        if waiting.done():
            return waiting.result()
    waiting.cancel()
    raise ShuttingDownError("the engine has stopped")
