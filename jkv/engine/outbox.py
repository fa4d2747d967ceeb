"""From the engine's thread to the event loops that requests came from.

Waking an event loop costs more than what it then does with a token, so a step's outputs go together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from jkv.engine.request import TokenOutput

_log = logging.getLogger(__name__)

_News = list[tuple[Callable[[TokenOutput], None], TokenOutput]]


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Who takes a request's outputs: a function that is called on an event loop and raises nothing."""

    loop: asyncio.AbstractEventLoop
    take: Callable[[TokenOutput], None]


class Outbox:
    """Outputs that are ready, in order. Owner: the engine's thread."""

    def __init__(self) -> None:
        self._news: dict[asyncio.AbstractEventLoop, _News] = {}

    def put(self, reader: Reader, output: TokenOutput) -> None:
        self._news.setdefault(reader.loop, []).append((reader.take, output))

    def send(self) -> None:
        """Hands over what was put since the last time, except to event loops that are closed."""
        if not self._news:
            return
        for loop, news in self._news.items():
            try:
                loop.call_soon_threadsafe(_deliver, news)
            except RuntimeError:
                _log.debug("%d outputs have no event loop any more", len(news))
        self._news = {}


def _deliver(news: _News) -> None:
    for take, output in news:
        take(output)
