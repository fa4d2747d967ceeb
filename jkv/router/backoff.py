"""How long to wait before trying again."""

from __future__ import annotations

import random


class Backoff:
    """Delays that double from `first` to `most` seconds, each shortened by up to a half, so that the clients
    of a server that comes back do not come all at once.
    """

    def __init__(self, *, first: float, most: float) -> None:
        self._first, self._most = first, most
        self._next = first

    def next(self) -> float:
        delay, self._next = self._next, min(2 * self._next, self._most)
        return delay * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._next = self._first
