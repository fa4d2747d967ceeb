"""Engines that register and a router that follows, over a real etcd and its faults."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from jkv.router import records
from jkv.router.etcd import Etcd, EtcdOptions
from jkv.router.etcd_ops import Delete, Put
from jkv.router.membership import MemberChange, Members, StaticMembers
from jkv.router.records import EngineRecord, EngineRefusedError
from jkv.router.registration import EngineReplacedError, Registration, RegistrationState
from tests.router.engine_records import engine
from tests.router.etcd_server import EtcdServer, etcd_members

WAIT_S = 30.0


class Cluster:
    """A router's members, and engines as tasks, each with an etcd client of its own."""

    def __init__(self, endpoints: tuple[str, ...], name: str, *, grace_s: float, lease_s: int) -> None:
        self._endpoints, self.name, self._lease_s = endpoints, name, lease_s
        self._clients: list[Etcd] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.members = Members(self.client(), name, grace_s=grace_s)
        self.changes: list[str] = []
        self.members.subscribe(self._note)
        self._tasks.append(asyncio.create_task(self.members.run()))

    def client(self) -> Etcd:
        client = Etcd(EtcdOptions(endpoints=self._endpoints, timeout_s=1.0))
        self._clients.append(client)
        return client

    def registration(self, record: EngineRecord) -> Registration:
        return Registration(self.client(), self.name, record, lease_s=self._lease_s)

    async def start(self, record: EngineRecord) -> tuple[Registration, asyncio.Task[None]]:
        registration = self.registration(record)
        await registration.join()
        return registration, self.run(registration)

    def run(self, registration: Registration) -> asyncio.Task[None]:
        task = asyncio.create_task(registration.run())
        self._tasks.append(task)
        return task

    async def until(self, look: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S
        while not look():
            assert time.monotonic() < end, (self.changes, self.members.state)
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError), result
        for client in self._clients:
            await client.close()

    def _note(self, change: MemberChange) -> None:
        self.changes.append(f"{change.member.id} {change.kind}")


def play(
    endpoints: tuple[str, ...],
    name: str,
    scene: Callable[[Cluster], Awaitable[None]],
    *,
    grace_s: float = 6.0,
    lease_s: int = 2,
) -> None:
    @contextlib.asynccontextmanager
    async def cluster() -> AsyncIterator[Cluster]:
        made = Cluster(endpoints, name, grace_s=grace_s, lease_s=lease_s)
        try:
            yield made
        finally:
            await made.close()

    async def run() -> None:
        async with cluster() as made:
            await scene(made)

    asyncio.run(run())


def test_engines_join_change_leave_and_are_replaced(shared_etcd: EtcdServer, cluster: str) -> None:
    async def scene(own: Cluster) -> None:
        first, second = engine("one"), engine("two")
        registration, running = await own.start(first)
        await own.start(second)
        await own.until(lambda: len(own.members.members) == 2)
        assert own.members.members["one"].record == first
        assert own.members.state.current

        registration.update(engine("one", incarnation=first.incarnation, tiers=("l1",)))
        await own.until(lambda: "one updated" in own.changes)
        with pytest.raises(ValueError, match="new process"):
            registration.update(engine("one", page_size=16))

        # Killed and started again before its lease ran out, with other pages.
        running.cancel()
        again, running = await own.start(engine("one", model="other", page_size=16))
        await own.until(lambda: "one replaced" in own.changes)
        running.cancel()
        await again.leave()
        await own.until(lambda: "one left" in own.changes)
        assert own.changes == ["one joined", "two joined", "one updated", "one replaced", "one left"]

        late: list[str] = []
        unsubscribe = own.members.subscribe(lambda change: late.append(change.member.id))
        assert late == ["two"]
        unsubscribe()

    play(shared_etcd.endpoints, cluster, scene)


def test_an_engine_that_dies_is_gone_after_its_lease_and_the_grace(
    shared_etcd: EtcdServer, cluster: str
) -> None:
    async def scene(own: Cluster) -> None:
        _, running = await own.start(engine())
        await own.until(lambda: bool(own.members.members))
        running.cancel()
        await own.until(lambda: not own.members.members)
        assert own.changes == ["one joined", "one left"]

    play(shared_etcd.endpoints, cluster, scene, grace_s=0.2, lease_s=1)


def test_an_engine_with_other_pages_is_refused_until_the_others_have_gone(
    shared_etcd: EtcdServer, cluster: str
) -> None:
    async def scene(own: Cluster) -> None:
        first, running = await own.start(engine("one"))
        odd = own.registration(engine("odd", page_size=16))
        with pytest.raises(
            EngineRefusedError, match=r"page_size 16 \(this engine\), 64 \(the others\); start it"
        ):
            await odd.join()
        await own.until(lambda: "odd" in own.members.refused)
        assert "engine one serves model org/tiny" in own.members.refused["odd"].refused
        await own.start(engine("namesake", page_size=16, model="tiny"))

        running.cancel()
        await first.leave()
        await odd.join()
        await own.until(lambda: own.members.members.keys() == {"odd", "namesake"})
        assert not own.members.refused

    play(shared_etcd.endpoints, cluster, scene)


def test_of_many_that_start_at_once_only_those_of_one_kind_get_in(
    shared_etcd: EtcdServer, cluster: str
) -> None:
    async def scene(own: Cluster) -> None:
        sizes = [(16, 64)[number % 2] for number in range(12)]
        joining = [
            own.registration(engine(f"e{number}", page_size=size)).join() for number, size in enumerate(sizes)
        ]
        results = await asyncio.gather(*joining, return_exceptions=True)
        inside = {size for size, result in zip(sizes, results, strict=True) if result is None}
        assert len(inside) == 1
        for size, result in zip(sizes, results, strict=True):
            assert size in inside or isinstance(result, EngineRefusedError), result

    play(shared_etcd.endpoints, cluster, scene, lease_s=20)


def test_the_older_of_two_processes_with_one_id_gives_way(shared_etcd: EtcdServer, cluster: str) -> None:
    async def scene(own: Cluster) -> None:
        old, old_running = await own.start(engine(address="old:1"))
        await own.start(engine(address="new:1"))
        await asyncio.wait_for(old_running, WAIT_S)
        assert old.status.state is RegistrationState.REPLACED
        assert "at new:1" in old.status.reason
        assert "--instance-id" in old.status.reason
        with pytest.raises(EngineReplacedError):
            await old.join()
        await own.until(lambda: own.members.members["one"].address == "new:1")

    play(shared_etcd.endpoints, cluster, scene)


def test_an_engine_that_leaves_lets_its_successor_stay(shared_etcd: EtcdServer, cluster: str) -> None:
    async def scene(own: Cluster) -> None:
        old = own.registration(engine(address="old:1"))
        await old.join()
        await own.start(engine(address="new:1"))
        await old.leave()
        await own.until(lambda: bool(own.members.members) and own.members.members["one"].address == "new:1")
        await asyncio.sleep(1)
        assert "one left" not in own.changes

    play(shared_etcd.endpoints, cluster, scene)


def test_a_record_that_is_deleted_comes_back_unnoticed(shared_etcd: EtcdServer, cluster: str) -> None:
    async def scene(own: Cluster) -> None:
        await own.start(engine())
        await own.until(lambda: bool(own.members.members))
        key = records.engine_key(cluster, "one")
        await own.client().txn([], [Delete(key)])
        await asyncio.sleep(1.5)
        assert await own.client().get(key) is not None
        assert own.changes == ["one joined"]

    play(shared_etcd.endpoints, cluster, scene)


def test_records_that_cannot_be_read_are_shown_as_refused(shared_etcd: EtcdServer, cluster: str) -> None:
    async def scene(own: Cluster) -> None:
        await own.client().txn([], [Put(records.engine_key(cluster, "odd"), b"{}")])
        await own.until(lambda: "odd" in own.members.refused)
        assert "cannot be read" in own.members.refused["odd"].refused
        await own.client().txn([], [Delete(records.engine_key(cluster, "odd"))])
        await own.until(lambda: not own.members.refused)

    play(shared_etcd.endpoints, cluster, scene)


def test_a_killed_etcd_freezes_the_view_and_nothing_flaps(own_etcd: EtcdServer) -> None:
    async def scene(own: Cluster) -> None:
        registration, _ = await own.start(engine())
        await own.until(lambda: bool(own.members.members))
        own_etcd.kill()
        await own.until(lambda: not own.members.state.current)
        assert own.members.state.reason
        assert own.members.members.keys() == {"one"}
        await own.until(lambda: registration.status.state is RegistrationState.OUT)
        await asyncio.to_thread(own_etcd.start)
        await own.until(lambda: own.members.state.current)
        await own.until(lambda: registration.status.state is RegistrationState.IN)
        await own.start(engine("two"))
        await own.until(lambda: "two" in own.members.members)
        assert own.changes == ["one joined", "two joined"]

    play(own_etcd.endpoints, "c", scene)


def test_an_emptied_etcd_is_filled_again_by_the_engines(own_etcd: EtcdServer) -> None:
    async def scene(own: Cluster) -> None:
        for number in range(3):
            await own.start(engine(f"e{number}"))
        await own.until(lambda: len(own.members.members) == 3)
        own_etcd.kill()
        own_etcd.empty()
        await asyncio.to_thread(own_etcd.start)

        client = own.client()
        end = time.monotonic() + WAIT_S
        while len((await client.list(records.engines_prefix("c")))[0]) < 3:
            assert time.monotonic() < end
            await asyncio.sleep(0.1)
        await own.until(lambda: own.members.state.current)
        await own.start(engine("new"))
        await own.until(lambda: "new" in own.members.members)
        await asyncio.sleep(4.5)  # longer than the grace: nobody was only waiting to be removed
        assert sorted(own.changes) == ["e0 joined", "e1 joined", "e2 joined", "new joined"]

    play(own_etcd.endpoints, "c", scene, grace_s=4.0)


def _stopped(server: EtcdServer, seconds: float) -> Callable[[Cluster], Awaitable[None]]:
    async def scene(own: Cluster) -> None:
        registration, _ = await own.start(engine())
        await own.until(lambda: bool(own.members.members))
        server.stop()
        await asyncio.sleep(seconds)
        assert not own.members.state.current
        assert registration.status.state is RegistrationState.OUT
        server.resume()
        await own.until(lambda: own.members.state.current)
        await own.until(lambda: registration.status.state is RegistrationState.IN)
        await asyncio.sleep(2)
        assert own.changes == ["one joined"]

    return scene


def test_a_stopped_etcd_freezes_the_view_although_leases_run_out(own_etcd: EtcdServer) -> None:
    play(own_etcd.endpoints, "c", _stopped(own_etcd, 5), lease_s=2)


@pytest.mark.full
def test_an_etcd_stopped_for_longer_than_the_lease(own_etcd: EtcdServer) -> None:
    play(own_etcd.endpoints, "c", _stopped(own_etcd, 15), lease_s=10, grace_s=15)


@pytest.mark.full
def test_members_of_etcd_die_and_freeze_one_after_the_other(tmp_path: Path) -> None:
    """Nobody leaves, and who joins is seen, while a majority lives."""

    async def scene(own: Cluster) -> None:
        await own.start(engine("e0"))
        await own.until(lambda: "e0" in own.members.members)
        for number, server in enumerate(servers, start=1):
            server.stop() if number == 2 else server.kill()
            registration = own.registration(engine(f"e{number}"))
            own.run(registration)
            await own.until(lambda number=number: f"e{number}" in own.members.members)
            if number == 2:
                server.resume()
            else:
                await asyncio.to_thread(server.start)
            await own.until(lambda: own.members.state.current)
        await asyncio.sleep(3)
        assert own.changes == [f"e{number} joined" for number in range(4)]

    with etcd_members(tmp_path, 3) as servers:
        endpoints = tuple(server.address for server in servers)
        play(endpoints, "c", scene, lease_s=5)


def test_a_static_set_is_there_at_once() -> None:
    members = StaticMembers(("a:1", "b:2"))
    seen: list[str] = []
    members.subscribe(lambda change: seen.append(change.member.address))
    assert seen == ["a:1", "b:2"]
    assert members.state.current
    assert members.members["a:1"].record is None
