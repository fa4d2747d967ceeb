"""A router, put together: members, engines, index, services, and the drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from jkv.api.listening import Listener
from jkv.router.config import RouterConfig
from jkv.router.engines import Engine, settle
from jkv.router.etcd import Etcd
from jkv.router.fleet import Fleet
from jkv.router.membership import MemberChange, Membership
from jkv.router.metrics import RouterMetrics
from jkv.router.proxy import Proxy
from jkv.router.router_servicer import RouterServicer
from jkv.router.selftest import self_test
from jkv.router.shard_counts import ShardCounts
from jkv.router.shared_l3 import SharedL3
from jkv.router.texts import Texts
from jkv.router.tokens import TokenCache
from jkv.router.view import View

log = logging.getLogger(__name__)

_HEALTH_EVERY_S = 0.1
_TOKEN_CACHE_BYTES = 32 * 2**20


class Router:
    """Listens from `start()` on; health is SERVING while it has an engine, until `close()`."""

    def __init__(self, config: RouterConfig, membership: Membership, etcd: Etcd | None = None) -> None:
        """`etcd` is where the membership comes from, and None where that is a fixed set."""
        self._membership = membership
        self._view = View(config.policy)
        self._fleet = Fleet(
            silence=config.suspect_after,
            pages=self._view.pages_of,
            forget=self._view.forget,
            self_test=self._self_test,
        )
        self._shards, self._shared_l3 = None, None
        if etcd is not None:
            self._shards = ShardCounts(etcd, config.cluster)
            self._shared_l3 = SharedL3(self._fleet, membership, self._view, etcd, config.cluster)
            self._view.shared_l3 = self._shared_l3.readable
        tokens = TokenCache(_TOKEN_CACHE_BYTES)
        texts = Texts(self._fleet, tokens)
        self._proxy = Proxy(self._fleet, self._view, texts, config.max_in_flight)
        self._listener = Listener()
        self._listener.add("Generation", self._proxy)
        router = RouterServicer(config, self._fleet, self._view, texts, membership, self._shards)
        self._listener.add("Router", router)
        self.metrics = RouterMetrics(self._fleet, self._view, self._proxy, tokens, membership)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int) -> int:
        """Listen and follow the cluster; see `Listener.start`."""
        bound = await self._listener.start(host, port)
        self._membership.subscribe(self._members_changed)
        works = [self._membership.run(), self._fleet.watch_silence(), self._tick()]
        works += [part.run() for part in (self._shards, self._shared_l3) if part is not None]
        self._tasks = [asyncio.create_task(work) for work in works]
        return bound

    async def ready(self) -> None:
        """Return once there is an engine to send requests to."""
        while not self._fleet.is_serving:
            await asyncio.sleep(_HEALTH_EVERY_S)

    async def ended(self) -> None:
        """Return when a part of the router has ended, which only a failure does; raises that."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def close(self) -> None:
        """Health turns NOT_SERVING and new requests are refused; those that run go on."""
        self._proxy.close()
        await self._listener.close()

    async def stop(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for what runs, then end it and all connections."""
        await self.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._proxy.idle(), timeout)
        await self._listener.stop()
        for task in self._tasks:
            await settle(task)
        await self._fleet.close()

    def _members_changed(self, change: MemberChange) -> None:
        members = self._membership.members
        self._fleet.set_members({name: member.address for name, member in members.items()})

    async def _self_test(self, engine: Engine) -> None:
        engine.self_test = await self_test(engine, self._view.predict)
        if engine.self_test.verdict != "passed":
            log.warning("engine %s: the self-test %s", engine.id, engine.self_test.verdict)

    async def _tick(self) -> None:
        while True:
            await self._listener.serving(self._fleet.is_serving)
            self._view.tidy()
            await asyncio.sleep(_HEALTH_EVERY_S)
