"""What followers of an engine see: it always ends up equal to what the tiers really hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from jkv.cache.events import ChangeLog
from jkv.cache.keys import request_root
from jkv.cache.l3 import format
from jkv.cache.pages import Tier, page_infos
from jkv.cache.replica import Digest, ReplicaEvent, ReplicaLoad, digest_of
from jkv.engine import replica as replica_module
from jkv.engine.replica import EngineReplica
from jkv.errors import FailedPreconditionError
from tests.engine.harness import Bench, build, random_prompt, request, tiny_checkpoint

PAGE = 16


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    directory: Path = tmp_path_factory.mktemp("l3")
    bench = build(
        tiny_checkpoint("llama3"),
        page_size=PAGE,
        l1_tokens=40 * PAGE,
        l2_gib=0.0005,
        l3_dir=str(directory),
        l3_gib=0.01,
        load_policy="always",
    )
    yield bench
    bench.stop()


class View:
    """What a follower believes."""

    def __init__(self) -> None:
        self.keys: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        self.incarnation, self.number, self.resets = "", 0, 0

    def apply(self, event: ReplicaEvent) -> None:
        assert event.reset or event.number in (self.number, self.number + 1), "a gap"
        if event.reset:
            self.resets += 1
            self.keys = {tier: set() for tier in Tier}
        for tier, keys in event.removed.items():
            self.keys[tier] -= set(keys)
        for tier, keys in event.added.items():
            self.keys[tier] |= set(keys)
        self.incarnation, self.number = event.incarnation, event.number

    def agrees(self, digest: Digest) -> bool:
        mine = {tier: digest_of(sorted(self.keys[tier])) for tier in digest.tiers}
        return self.number == digest.number and mine == digest.tiers


@asynccontextmanager
async def following(replica: EngineReplica, view: View) -> AsyncIterator[None]:
    async def follow() -> None:
        async with aclosing(replica.watch(view.incarnation, view.number)) as events:
            async for event in events:
                view.apply(event)

    task = asyncio.create_task(follow())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():
            await asyncio.sleep(0.01)


def test_a_follower_sees_every_tier_through_churn_flushes_and_reconnections(bench: Bench) -> None:
    replica, view = bench.engine.replica, View()

    async def agrees() -> bool:
        return view.agrees(await replica.digest())

    async def churn(seed: int) -> None:
        await asyncio.gather(*(bench.collect(request(random_prompt(seed + i, 70), 4)) for i in range(8)))

    async def scenario() -> None:
        async with following(replica, view):
            await churn(0)
            await until(agrees)
            assert all(view.keys[tier] for tier in Tier)
            await churn(100)
            await bench.engine.cache.flush([Tier.L1])
            await until(agrees)
            assert not view.keys[Tier.L1]
        assert view.resets == 1
        await churn(200)  # while nobody follows
        async with following(replica, view):
            await until(agrees)
            assert view.resets == 1, "what was missed is kept, no snapshot needed"
            await bench.engine.cache.flush([Tier.L1, Tier.L2, Tier.L3])
            await until(agrees)
        assert not any(view.keys.values())
        view.incarnation, view.number = "of another process", -1
        async with following(replica, view):
            await until(agrees)
        assert view.resets == 2

    asyncio.run(scenario())


def test_a_follower_that_has_missed_something_knows_for_good() -> None:
    async def scenario() -> None:
        follower = replica_module._Follower(asyncio.get_running_loop())
        for _ in range(replica_module._MAX_BACKLOG + 1):  # the event loop is busy meanwhile
            follower.put(ReplicaLoad())
        assert follower.behind
        await asyncio.sleep(0)
        for _ in range(10):
            assert await follower.get() is not None
        assert follower.behind, "it goes on, over a gap"

    asyncio.run(scenario())


def test_the_load_ends_at_rest(bench: Bench) -> None:
    replica = bench.engine.replica

    async def scenario() -> list[ReplicaEvent]:
        events: list[ReplicaEvent] = []
        run = None
        async with asyncio.timeout(60), aclosing(replica.watch("", 0)) as stream:
            async for event in stream:
                events.append(event)
                if run is None:
                    many = (bench.collect(request(random_prompt(700 + i, 300), 40)) for i in range(12))
                    run = asyncio.gather(*many)
                if run.done() and not event.load.running:
                    break
        return events

    events = asyncio.run(scenario())
    assert max(e.load.running for e in events) > 0
    assert max(e.load.waiting for e in events) > 0
    assert max(e.load.prefill_tokens for e in events) > 300
    assert (events[-1].load.running, events[-1].load.waiting, events[-1].load.prefill_tokens) == (0, 0, 0)


def test_what_is_cached_is_not_counted_as_work(bench: Bench) -> None:
    replica, prompt = bench.engine.replica, random_prompt(21, 20 * PAGE)

    async def most_work() -> int:
        most = 0
        async with asyncio.timeout(60), aclosing(replica.watch("", 0)) as stream:
            run = None
            async for event in stream:
                most = max(most, event.load.prefill_tokens)
                if run is None:
                    run = asyncio.gather(*(bench.collect(request(prompt, 30)) for _ in range(12)))
                elif run.done() and not event.load.running:
                    break
        return most

    asyncio.run(bench.engine.cache.flush([Tier.L1, Tier.L2, Tier.L3]))
    asyncio.run(most_work())
    assert asyncio.run(most_work()) <= 12 * PAGE


def test_a_peer_gets_verifiable_pages_up_to_the_first_that_is_missing(bench: Bench) -> None:
    replica, prompt = bench.engine.replica, random_prompt(11, 5 * PAGE + 3)
    bench.one(request(prompt, 1))
    identity = replica._identity
    root = request_root(identity.model_root)
    infos = page_infos(root, root, [*prompt, *random_prompt(12, 2 * PAGE)], PAGE)

    async def fetch(model_root: bytes) -> list[bytes]:
        return [page async for page in replica.fetch(model_root, [info.key for info in infos])]

    from_l1 = asyncio.run(fetch(identity.model_root))
    asyncio.run(bench.engine.cache.flush([Tier.L1]))
    from_l2 = asyncio.run(fetch(identity.model_root))
    assert len(from_l1) == 5
    assert from_l1 == from_l2
    for info, page in zip(infos, from_l1, strict=False):
        assert format.verify(identity, info, page) is None
        assert np.any(format.payload(page))
    with pytest.raises(FailedPreconditionError, match="model root"):
        asyncio.run(fetch(b"x" * 16))


def test_a_log_keeps_what_a_follower_may_have_missed_and_says_when_it_does_not() -> None:
    log = ChangeLog()
    assert log.take() is None
    for number in range(1, 4):
        log.add(Tier.L1, bytes([number]))
        log.remove(Tier.L1, bytes([number - 1]))
        log.add(Tier.L2, b"x")
        log.remove(Tier.L2, b"x")
        changes = log.take()
        assert changes is not None
        assert changes.number == number
        assert changes.added == {Tier.L1: [bytes([number])]}
        assert changes.removed == {Tier.L1: [bytes([number - 1])], Tier.L2: [b"x"]}
    since = log.since(1)
    assert since is not None
    assert [c.number for c in since] == [2, 3]
    assert log.since(3) == []
    assert log.since(4) is None
    for key in range(200_000):
        log.add(Tier.L3, key.to_bytes(4))
        if key % 50_000 == 0:
            log.take()
    log.take()
    assert log.since(1) is None
