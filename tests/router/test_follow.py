"""Following a prefix through faults that make a follower miss something."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

from jkv.router.etcd import Etcd, EtcdOptions
from jkv.router.etcd_follow import Changed, Frozen, Listed, Step, follow, make_history
from jkv.router.etcd_ops import Delete, EtcdUnavailableError, Put
from tests.router.etcd_server import EtcdServer
from tests.router.relay import Relay, relay

PREFIX, HISTORY = "/f/keys/", "/f/history"
WAIT_S = 30.0

Steps = AsyncGenerator[Step]
Scene = Callable[[Steps, Etcd, Relay], Awaitable[None]]


def play(server: EtcdServer, scene: Scene) -> None:
    """The follower goes through a relay, `Etcd` does not."""

    async def run() -> None:
        async with relay(server.address) as link:
            direct = Etcd(server.options)
            through = Etcd(EtcdOptions(endpoints=(link.address,), timeout_s=1.0))
            await make_history(direct, HISTORY)
            await direct.txn([], [Put(f"{PREFIX}a", b"1"), Put(f"{PREFIX}b", b"1")])
            async with contextlib.aclosing(follow(through, PREFIX, HISTORY)) as steps:
                first = await anext(steps)
                assert isinstance(first, Listed)
                assert names(first) == {"a": b"1", "b": b"1"}
                assert await anext(steps) == Changed(())
                await scene(steps, direct, link)
            await through.close()
            await direct.close()

    asyncio.run(run())


def names(step: Listed) -> dict[str, bytes]:
    return {kv.key.removeprefix(PREFIX): kv.value for kv in step.found}


async def next_step(steps: Steps, kind: type[Step]) -> Step:
    """The next one of a kind; those before it can only tell of trouble, or of its end."""
    while True:
        step = await asyncio.wait_for(anext(steps), WAIT_S)
        if isinstance(step, kind):
            return step
        assert isinstance(step, Frozen) or step == Changed(()), step


async def once_up(call: Callable[[], Awaitable[object]]) -> None:
    end = time.monotonic() + WAIT_S
    while True:
        try:
            await call()
            return
        except EtcdUnavailableError:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)


def test_changes_come_in_order_also_those_during_a_cut(own_etcd: EtcdServer) -> None:
    async def scene(steps: Steps, direct: Etcd, link: Relay) -> None:
        await direct.txn([], [Put(f"{PREFIX}a", b"2")])
        step = await anext(steps)
        assert isinstance(step, Changed)
        assert [event.kv.value for event in step.events] == [b"2"]
        link.cut()
        assert isinstance(await anext(steps), Frozen)
        await direct.txn([], [Put(f"{PREFIX}a", b"3")])
        await direct.txn([], [Delete(f"{PREFIX}b")])
        link.mend()
        seen: list[tuple[str, bool]] = []
        while len(seen) < 2:
            step = await next_step(steps, Changed)
            assert isinstance(step, Changed)
            seen += [(event.kv.key.removeprefix(PREFIX), event.deleted) for event in step.events]
        assert seen == [("a", False), ("b", True)]

    play(own_etcd, scene)


def test_a_compaction_past_the_watch_means_a_new_listing(own_etcd: EtcdServer) -> None:
    async def scene(steps: Steps, direct: Etcd, link: Relay) -> None:
        link.cut()
        assert isinstance(await anext(steps), Frozen)
        await direct.txn([], [Put(f"{PREFIX}c", b"1")])
        await direct.txn([], [Delete(f"{PREFIX}a")])
        await asyncio.to_thread(own_etcd.compact)
        link.mend()
        step = await next_step(steps, Listed)
        assert isinstance(step, Listed)
        assert names(step) == {"b": b"1", "c": b"1"}

    play(own_etcd, scene)


def test_an_emptied_store_is_noticed_also_where_its_revisions_are_ahead(own_etcd: EtcdServer) -> None:
    async def scene(steps: Steps, direct: Etcd, link: Relay) -> None:
        link.cut()
        own_etcd.kill()
        own_etcd.empty()
        assert isinstance(await anext(steps), Frozen)
        await asyncio.to_thread(own_etcd.start)
        for _ in range(20):
            await once_up(lambda: direct.txn([], [Put("/f/other", b"")]))
        await direct.txn([], [Put(f"{PREFIX}new", b"1")])
        link.mend()
        step = await next_step(steps, Listed)
        assert isinstance(step, Listed)
        assert names(step) == {"new": b"1"}

    play(own_etcd, scene)


def test_a_slow_etcd_freezes_the_view_and_loses_nothing(own_etcd: EtcdServer) -> None:
    async def scene(steps: Steps, direct: Etcd, link: Relay) -> None:
        link.hold()
        started = time.monotonic()
        await direct.txn([], [Put(f"{PREFIX}a", b"2")])
        assert isinstance(await asyncio.wait_for(anext(steps), WAIT_S), Frozen)
        assert time.monotonic() - started < 10
        link.release()
        step = await next_step(steps, Changed)
        while isinstance(step, Changed) and not step.events:
            step = await next_step(steps, Changed)
        assert isinstance(step, Changed)
        assert step.events[0].kv.value == b"2"

    play(own_etcd, scene)
