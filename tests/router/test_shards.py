"""The record of L3's pages in a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from jkv.router import records
from jkv.router import shard_records as shards
from jkv.router.etcd import Etcd, EtcdOptions
from jkv.router.etcd_ops import EtcdUnavailableError, Put
from jkv.router.records import EngineRecord, RecordError, StoreRef
from jkv.router.shards import ShardFencedError, ShardLog, collect_shards, read_shards
from tests.router.engine_records import engine
from tests.router.etcd_server import EtcdServer

STORE = StoreRef(url="file:///pages", token="t0k3n", owner="first")
WAIT_S = 30.0


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def keys(numbers: Iterable[int]) -> list[bytes]:
    return [key(number) for number in numbers]


def writer(name: str = "one", **changes: object) -> EngineRecord:
    return engine(name, store=STORE, **changes)


def play(server: EtcdServer, scene: Callable[[Etcd], Awaitable[None]]) -> None:
    async def run() -> None:
        etcd = Etcd(EtcdOptions(endpoints=(server.address,), timeout_s=1.0))
        await scene(etcd)
        await etcd.close()

    asyncio.run(run())


async def recorded(etcd: Etcd, cluster: str) -> list[bytes]:
    found = b""
    async for piece in read_shards(etcd, cluster):
        found += piece.keys
    return shards.split_keys(found)


def test_what_is_written_and_evicted_is_read_back(shared_etcd: EtcdServer, cluster: str) -> None:
    async def scene(etcd: Etcd) -> None:
        log = ShardLog(etcd, cluster, writer())
        log.add(keys(range(500)))
        log.remove(keys(range(100, 110)))
        await log.flush()
        assert log.stats.unsaved == 0
        pieces = [piece async for piece in read_shards(etcd, cluster)]
        assert [piece.shard.store for piece in pieces] == [STORE]
        assert pieces[0].shard.engine == "one"
        expected = [number for number in range(500) if not 100 <= number < 110]
        assert pieces[0].keys == b"".join(keys(expected))

    play(shared_etcd, scene)


def test_the_task_writes_full_extents_by_itself_for_few_puts(shared_etcd: EtcdServer, cluster: str) -> None:
    async def scene(etcd: Etcd) -> None:
        log = ShardLog(etcd, cluster, writer())
        task = asyncio.create_task(log.run())
        for start in range(0, 12_800, 100):
            log.add(keys(range(start, start + 100)))
            await asyncio.sleep(0)
        end = time.monotonic() + WAIT_S
        while log.stats.unsaved:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        task.cancel()
        assert await recorded(etcd, cluster) == keys(range(12_800))
        versions = [kv for kv in (await etcd.list(f"/jkv/{cluster}/"))[0] if "/extents/" in kv.key]
        assert all(kv.create_revision == kv.mod_revision for kv in versions), "an extent was written twice"
        puts = log.stats.puts + 1  # the claim
        print(f"{puts} puts for 12,800 pages: 1 for {12_800 / puts:.0f}")
        assert puts <= 12_800 / 32

    play(shared_etcd, scene)


def test_changes_come_from_any_thread(shared_etcd: EtcdServer, cluster: str) -> None:
    async def scene(etcd: Etcd) -> None:
        log = ShardLog(etcd, cluster, writer())
        task = asyncio.create_task(log.run())

        def change(first: int) -> None:
            for start in range(first, first + 2000, 10):
                log.add(keys(range(start, start + 10)))
                log.remove(keys(range(start, start + 5)))

        with ThreadPoolExecutor(4) as pool:
            loop = asyncio.get_running_loop()
            await asyncio.gather(*(loop.run_in_executor(pool, change, 10_000 * n) for n in range(4)))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await log.flush()
        expected = {key(10_000 * n + number) for n in range(4) for number in range(2000) if number % 10 >= 5}
        assert set(await recorded(etcd, cluster)) == expected

    play(shared_etcd, scene)


def test_an_owner_that_was_replaced_writes_no_more(shared_etcd: EtcdServer, cluster: str) -> None:
    async def scene(etcd: Etcd) -> None:
        old, new = (ShardLog(etcd, cluster, writer(name)) for name in ("old", "new"))
        old.add(keys(range(64)))
        await old.flush()
        new.add(keys(range(32)))
        await new.flush()
        old.add(keys(range(1000, 2000)))
        with pytest.raises(ShardFencedError, match="engine new has claimed L3 owner first"):
            await old.flush()
        await asyncio.wait_for(old.run(), WAIT_S)
        assert "new" in old.trouble
        assert await recorded(etcd, cluster) == keys(range(32))

    play(shared_etcd, scene)


def test_a_restart_writes_only_what_differs(shared_etcd: EtcdServer, cluster: str) -> None:
    async def scene(etcd: Etcd) -> None:
        log = ShardLog(etcd, cluster, writer())
        log.add(keys(range(6400)))
        await log.flush()
        again = ShardLog(etcd, cluster, writer())
        again.add(keys(range(10, 6464)))
        await again.flush()
        assert again.stats.puts == 2
        assert set(await recorded(etcd, cluster)) == set(keys(range(10, 6464)))
        other = ShardLog(etcd, cluster, writer(model_root=b"x" * 16))
        await other.flush()
        assert await recorded(etcd, cluster) == []

    play(shared_etcd, scene)


def test_a_claim_whose_answer_was_lost_is_still_ones_own(shared_etcd: EtcdServer, cluster: str) -> None:
    async def scene(etcd: Etcd) -> None:
        log = ShardLog(etcd, cluster, writer())
        await log.flush()
        kv = await etcd.get(shards.shard_key(cluster, STORE))
        assert kv is not None
        await etcd.txn([], [Put(kv.key, kv.value)])
        log.add(keys(range(64)))
        await log.flush()
        assert await recorded(etcd, cluster) == keys(range(64))

    play(shared_etcd, scene)


def test_records_that_cannot_be_read_harm_nobody(shared_etcd: EtcdServer, cluster: str) -> None:
    async def scene(etcd: Etcd) -> None:
        log = ShardLog(etcd, cluster, writer())
        log.add(keys(range(64)))
        await log.flush()
        await etcd.txn(
            [],
            [
                Put(f"{shards.shards_prefix(cluster)}x/y", b"{}"),
                Put(f"{shards.extents_prefix(cluster, STORE)}odd", b"\x01"),
                Put(shards.extent_key(cluster, STORE, 7), b"\x02" + key(1)),
            ],
        )
        assert await recorded(etcd, cluster) == keys(range(64))
        again = ShardLog(etcd, cluster, writer())
        again.add(keys(range(64)))
        await again.flush()
        assert again.stats.puts == 0

    play(shared_etcd, scene)


def test_abandoned_owners_are_collected(shared_etcd: EtcdServer, cluster: str) -> None:
    async def scene(etcd: Etcd) -> None:
        log = ShardLog(etcd, cluster, writer())
        log.add(keys(range(64)))
        await log.flush()
        assert await collect_shards(etcd, cluster) == []
        kv = await etcd.get(shards.shard_key(cluster, STORE))
        assert kv is not None
        abandoned = shards.parse_shard(kv.value)
        assert await collect_shards(etcd, cluster, after_s=-1) == [abandoned]
        assert [piece async for piece in read_shards(etcd, cluster)] == []
        # It was only away: it writes everything again.
        log.add(keys(range(64, 128)))
        await log.flush()
        assert await recorded(etcd, cluster) == keys(range(128))

    play(shared_etcd, scene)


def test_etcd_that_is_gone_costs_the_engine_nothing(own_etcd: EtcdServer) -> None:
    async def scene(etcd: Etcd) -> None:
        log = ShardLog(etcd, "c", writer())
        log.add(keys(range(64)))
        task = asyncio.create_task(log.run())
        while log.trouble:
            await asyncio.sleep(0.02)
        own_etcd.stop()
        log.add(keys(range(64, 128)))
        await asyncio.sleep(1)  # a write is on its way
        started = time.monotonic()
        for start in range(128, 20_128, 10):
            log.add(keys(range(start, start + 10)))
            log.remove(keys(range(start, start + 5)))
        assert time.monotonic() - started < 2.0
        with pytest.raises(EtcdUnavailableError):
            await log.flush()
        assert log.trouble
        own_etcd.resume()
        end = time.monotonic() + WAIT_S
        while log.trouble:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        await log.flush()
        expected = {*range(128), *(number for number in range(128, 20_128) if (number - 128) % 10 >= 5)}
        assert set(await recorded(etcd, "c")) == set(keys(expected))
        task.cancel()

    play(own_etcd, scene)


def test_an_emptied_etcd_is_written_again_by_the_right_owner(own_etcd: EtcdServer) -> None:
    async def scene(etcd: Etcd) -> None:
        old, new = (ShardLog(etcd, "c", writer(name)) for name in ("old", "new"))
        old.add(keys(range(1000, 1064)))
        await old.flush()
        new.add(keys(range(100)))
        await new.flush()
        own_etcd.kill()
        own_etcd.empty()
        await asyncio.to_thread(own_etcd.start)
        old.add(keys(range(1064, 1128)))
        end = time.monotonic() + WAIT_S
        while True:  # the old owner, which knows nothing of the new one, comes first
            try:
                await old.flush()
                break
            except EtcdUnavailableError:
                assert time.monotonic() < end
        assert len(await recorded(etcd, "c")) == 128
        new.add(keys(range(100, 200)))
        await new.flush()
        assert await recorded(etcd, "c") == keys(range(200))
        old.add(keys(range(1128, 1192)))
        with pytest.raises(ShardFencedError):
            await old.flush()

    play(own_etcd, scene)


def test_an_emptied_etcd_is_written_again_also_where_nothing_changes(own_etcd: EtcdServer) -> None:
    async def scene(etcd: Etcd) -> None:
        log = ShardLog(etcd, "c", writer())
        log.add(keys(range(128)))
        await log.flush()
        task = asyncio.create_task(log.run())
        own_etcd.kill()
        own_etcd.empty()
        await asyncio.to_thread(own_etcd.start)
        end = time.monotonic() + WAIT_S
        found: list[bytes] = []
        while set(found) != set(keys(range(128))):
            assert time.monotonic() < end
            await asyncio.sleep(0.1)
            with contextlib.suppress(EtcdUnavailableError):
                found = await recorded(etcd, "c")
        task.cancel()

    play(own_etcd, scene)


def test_an_engine_without_a_store_has_no_log(shared_etcd: EtcdServer) -> None:
    async def scene(etcd: Etcd) -> None:
        with pytest.raises(ValueError, match="no store"):
            ShardLog(etcd, "c", engine())

    play(shared_etcd, scene)


def test_shard_records_come_back_and_others_are_refused() -> None:
    record = shards.ShardRecord(
        store=STORE,
        engine="e",
        incarnation="i",
        model="m",
        model_root=b"r" * 16,
        page_size=64,
        format_version=1,
        epoch=3,
        renewed=4,
    )
    assert shards.parse_shard(records.encode(record)) == record
    for value in (b"", b"{}", records.encode(record).replace(b'"epoch": 3', b'"epoch": "3"')):
        with pytest.raises(RecordError):
            shards.parse_shard(value)
    with pytest.raises(RecordError):
        shards.extent_keys(b"\x01short")
    with pytest.raises(RecordError):
        shards.extent_number("/jkv/c/extents/s/o/nonsense")
