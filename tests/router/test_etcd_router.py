"""Routers that find their engines in a real etcd."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from jkv.api import jkv_pb2 as pb
from jkv.router.config import RouterConfig
from jkv.router.engines import settle
from jkv.router.etcd import Etcd
from jkv.router.membership import Members
from jkv.router.records import EngineRecord, StoreRef
from jkv.router.registration import Registration
from jkv.router.server import Router
from jkv.router.shards import ShardLog
from tests.router.doubles import Double, doubles
from tests.router.engine_records import engine
from tests.router.etcd_server import EtcdServer
from tests.router.rig import PROMPT, Rig, prompt, until


def _record(double: Double) -> EngineRecord:
    about = double.description
    return engine(
        about.id,
        address=double.address,
        incarnation=double.incarnation,
        model=about.model,
        model_root=about.model_root,
        page_size=about.page_size,
    )


@asynccontextmanager
async def _client(server: EtcdServer) -> AsyncGenerator[Etcd, None]:
    etcd = Etcd(server.options)
    try:
        yield etcd
    finally:
        await etcd.close()


@asynccontextmanager
async def _routing(server: EtcdServer, cluster: str) -> AsyncGenerator[Rig, None]:
    config = RouterConfig(etcd=server.address, cluster=cluster)
    async with _client(server) as etcd:
        router = Router(config, Members(etcd, cluster), etcd)
        rig = Rig(router, f"127.0.0.1:{await router.start('127.0.0.1', 0)}")
        try:
            yield rig
        finally:
            await rig.close()
            await router.stop(0.5)


async def _digests(rig: Rig, ids: list[str]) -> list[pb.DigestResponse]:
    return [await rig.service.Digest(pb.RouterDigestRequest(engine=id)) for id in ids]


def _passed(rig: Rig) -> list[str]:
    return sorted(one.id for one in rig.router._fleet.engines if one.self_test.verdict == "passed")


def test_engines_come_and_go_two_routers_agree_and_a_new_one_is_ready_at_once(
    shared_etcd: EtcdServer, cluster: str
) -> None:
    async def run() -> None:
        async with doubles("one", "two") as (one, two), _client(shared_etcd) as etcd:
            gone = Registration(
                etcd, cluster, dataclasses.replace(_record(one), id="gone", address="127.0.0.1:1")
            )
            registrations = [Registration(etcd, cluster, _record(double)) for double in (one, two)]
            for registration in (gone, *registrations):
                await registration.join()
            async with _routing(shared_etcd, cluster) as first, _routing(shared_etcd, cluster) as second:
                for rig in (first, second):
                    await until(lambda rig=rig: _passed(rig) == ["one", "two"])
                one.publish(one.change("l1", one.keys(PROMPT)))
                for rig in (first, second):
                    await until(lambda rig=rig: _numbers(rig) == {"one": one.number, "two": two.number})
                assert await _digests(first, ["one", "two"]) == await _digests(second, ["one", "two"])
                answers = [await rig.generate(prompt()) for rig in (first, second)]
                assert [answer.engines() for answer in answers] == [["one"], ["one"]]
                await registrations[0].leave()
                await until(lambda: _passed(first) == ["two"])
                assert (await first.generate(prompt())).engines() == ["two"]
                assert await _membership(first) == "etcd"
            started = time.monotonic()
            async with _routing(shared_etcd, cluster) as third:
                await third.router.ready()
                assert time.monotonic() - started < 5
                status = await third.status()
                assert status["gone"].state == "connecting"

    asyncio.run(run())


def _numbers(rig: Rig) -> dict[str, int]:
    return {one.id: one.number for one in rig.router._fleet.engines if one.synced}


async def _membership(rig: Rig) -> str:
    return (await rig.service.Status(pb.RouterStatusRequest())).membership


def test_without_etcd_everything_serves_on(own_etcd: EtcdServer, cluster: str) -> None:
    async def run() -> None:
        async with doubles("one", "two") as (one, two), _client(own_etcd) as etcd:
            registrations = [Registration(etcd, cluster, _record(double)) for double in (one, two)]
            for registration in registrations:
                await registration.join()
            tasks = [asyncio.create_task(registration.run()) for registration in registrations]
            async with _routing(own_etcd, cluster) as rig:
                await until(lambda: _passed(rig) == ["one", "two"])
                own_etcd.kill()
                await until(lambda: not rig.router._membership.state.current)
                assert (await _membership(rig)).startswith("frozen: ")
                for _ in range(4):
                    assert (await rig.generate(prompt())).code is grpc.StatusCode.OK
                await one.kill()
                for _ in range(4):
                    assert (await rig.generate(prompt())).engines() == ["two"]
                own_etcd.start()
                await until(lambda: rig.router._membership.state.current, 20)
                assert (await rig.generate(prompt())).engines() == ["two"]
            for task in tasks:
                await settle(task)

    asyncio.run(run())


def test_engines_that_do_not_fit_and_shards_show_in_the_status(
    shared_etcd: EtcdServer, cluster: str, tmp_path: Path
) -> None:
    async def run() -> None:
        async with doubles("one") as (one,), _client(shared_etcd) as etcd:
            store = StoreRef(url=tmp_path.as_uri(), token="t" * 8, owner="mine")
            record = dataclasses.replace(_record(one), store=store)
            await Registration(etcd, cluster, record).join()
            log = ShardLog(etcd, cluster, record)
            log.add([bytes([number]) * 16 for number in range(70)])
            await log.flush()
            misfit = Registration(
                etcd, cluster, dataclasses.replace(_record(one), id="misfit", address="b:2", page_size=32)
            )
            task = asyncio.create_task(misfit.run())
            async with _routing(shared_etcd, cluster) as rig:
                await until(lambda: _passed(rig) == ["one"])
                await until(lambda: rig.router._membership.refused)
                await until(lambda: rig.router._shards is not None and rig.router._shards.of("one"))
                answer = await rig.service.Status(pb.RouterStatusRequest())
                (refused,) = answer.refused
                assert (refused.id, refused.address) == ("misfit", "b:2")
                assert "page_size 32" in refused.reason
                (status,) = answer.engines
                assert (status.id, status.shards) == ("one", 1)
            await settle(task)

    asyncio.run(run())


def test_what_an_engine_that_is_away_wrote_counts_for_those_that_see_its_store(
    shared_etcd: EtcdServer, cluster: str, tmp_path: Path
) -> None:
    """In a router that starts, from the record in etcd; in one that knew it, from what it told."""

    async def run() -> None:
        async with doubles("one", "two", "three") as engines, _client(shared_etcd) as etcd:
            stores = [
                StoreRef(url=tmp_path.as_uri(), token=token, owner=f"owner{number}")
                for number, token in enumerate(("shared", "shared", "other"))
            ]
            records = [
                dataclasses.replace(_record(double), store=store)
                for double, store in zip(engines, stores, strict=True)
            ]
            registrations = [Registration(etcd, cluster, record) for record in records]
            for registration in registrations:
                await registration.join()
            one = engines[0]
            for double in engines:
                double.description.tiers.append("l3")
                double.pages["l3"] = set()
            log = ShardLog(etcd, cluster, records[0])
            log.add(one.keys(PROMPT))
            await log.flush()
            one.publish(one.change("l3", one.keys(PROMPT)))
            async with _routing(shared_etcd, cluster) as knew:
                await until(lambda: _passed(knew) == ["one", "three", "two"])
                assert await _l3(knew) == {"one": 40, "two": 0, "three": 0}
                await one.kill()
                await until(lambda: "one" not in _numbers(knew))
                assert await _l3(knew) == {"two": 40, "three": 0}
                async with _routing(shared_etcd, cluster) as started:
                    await until(lambda: _passed(started) == ["three", "two"])
                    await until(lambda: started.router._view.pages >= 5)
                    assert await _l3(started) == {"two": 40, "three": 0}
                    await one.restart()
                    for rig in (knew, started):
                        await until(lambda rig=rig: "one" in _numbers(rig))
                        # Its own word is that it holds nothing.
                        assert await _l3(rig) == {"one": 0, "two": 0, "three": 0}

    asyncio.run(run())


async def _l3(rig: Rig) -> dict[str, int]:
    """How many of the prompt's tokens each engine could load from L3."""
    prefix = pb.Prefix(token_ids=pb.TokenIds(ids=PROMPT))
    answer = await rig.service.Explain(pb.ExplainRequest(prefix=prefix))
    return {one.id: one.matched.l3 for one in answer.engines}
