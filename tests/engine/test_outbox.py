from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from jkv.engine.outbox import Outbox, Reader
from jkv.engine.request import TokenOutput


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts how often another thread wakes it."""

    def __init__(self) -> None:
        super().__init__()
        self.woken = 0

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Handle:
        self.woken += 1
        return super().call_soon_threadsafe(callback, *args, **kwargs)


def test_a_steps_outputs_wake_each_event_loop_once_and_keep_their_order() -> None:
    outbox, got = Outbox(), dict[str, list[int]]()
    loops = [CountingLoop(), CountingLoop()]
    readers = {
        name: Reader(loop=loop, take=lambda o, name=name: got.setdefault(name, []).extend(o.token_ids))
        for name, loop in zip("abc", [*loops, loops[0]], strict=True)
    }
    for step in range(3):
        for name in "abc":
            outbox.put(readers[name], TokenOutput(token_ids=(step,)))
        outbox.send()
    outbox.send()  # there is nothing left
    for loop in loops:
        loop.run_until_complete(asyncio.sleep(0))
        assert loop.woken == 3
        loop.close()
    assert got == {name: [0, 1, 2] for name in "abc"}


def test_a_closed_event_loop_does_not_keep_outputs_from_others() -> None:
    outbox, got = Outbox(), list[TokenOutput]()
    closed, loop = asyncio.new_event_loop(), asyncio.new_event_loop()
    closed.close()
    output = TokenOutput(token_ids=(1,))
    outbox.put(Reader(loop=closed, take=got.append), output)
    outbox.put(Reader(loop=loop, take=got.append), output)
    outbox.send()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert got == [output]
