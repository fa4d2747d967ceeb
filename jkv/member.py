"""An engine's place in its cluster: its record in etcd, the record of its L3, and the peers it may trust."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from importlib.metadata import version
from typing import Any

from jkv.api.peers import GrpcPeers
from jkv.cache.keys import FORMAT_VERSION
from jkv.cache.replica import Replica
from jkv.config import ServeConfig
from jkv.router.etcd import Etcd, EtcdOptions
from jkv.router.etcd_ops import EtcdError
from jkv.router.membership import MemberChange, Members
from jkv.router.records import EngineRecord, StoreRef
from jkv.router.registration import Registration, RegistrationState
from jkv.router.shards import ShardLog

_log = logging.getLogger(__name__)

# In which routers hear that an engine has left, and what they have sent just before arrives.
_NEWS_S = 0.3


class ClusterMember:
    """`join` once the engine serves, `leave` before it stops. Without etcd the engine serves on alone."""

    def __init__(self, config: ServeConfig, options: EtcdOptions, replica: Replica, address: str) -> None:
        self._replica, self._cluster = replica, config.cluster
        self._etcd = Etcd(options)
        self._record = _record(config, replica, address)
        self._peers = GrpcPeers(config.load_timeout)
        self._registration = Registration(self._etcd, config.cluster, self._record)
        self._members = Members(self._etcd, config.cluster)
        self._shards = (
            None if self._record.store is None else ShardLog(self._etcd, self._cluster, self._record)
        )
        self._tasks: list[asyncio.Task[None]] = []
        # Replaced as a whole by the event loop, read by any thread.
        self._addresses: frozenset[str] = frozenset()
        self._members.subscribe(self._changed)

    @property
    def registered(self) -> bool:
        """Whether routers find this engine in etcd."""
        return self._registration.status.state is RegistrationState.IN

    @property
    def recording(self) -> bool | None:
        """Whether etcd gets to know what L3 holds; None without L3."""
        return None if self._shards is None else not self._shards.trouble

    async def join(self) -> None:
        """Registers; where etcd cannot be reached, goes on trying.

        Raises:
            EngineRefusedError: live engines of the same model have other pages.
        """
        try:
            await self._registration.join()
            _log.info("joined cluster %s as %s at %s", self._cluster, self._record.id, self._record.address)
        except EtcdError as error:
            _log.warning("not in cluster %s yet, going on alone: %s", self._cluster, error)
        if self._shards is not None:
            self._replica.follow_own(self._shards.add, self._shards.remove)
            self._start(self._shards.run())
        self._replica.use_peers(self._peers, self.trusts)
        self._start(self._registration.run())
        self._start(self._members.run())

    async def leave(self) -> None:
        """Takes the record away, and returns when routers send nothing more here."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._registration.leave()
        await asyncio.sleep(_NEWS_S)

    async def close(self) -> None:
        """After the engine's end: records what it wrote last."""
        if self._shards is not None:
            with contextlib.suppress(EtcdError):
                await self._shards.flush()
        self._peers.close()
        await self._etcd.close()

    def trusts(self, address: str) -> bool:
        """Whether an engine of the cluster is at this address. For any thread."""
        return address in self._addresses

    def _changed(self, _: MemberChange) -> None:
        self._addresses = frozenset(member.address for member in self._members.members.values())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))


def _record(config: ServeConfig, replica: Replica, address: str) -> EngineRecord:
    about, store = replica.description, replica.store
    return EngineRecord(
        id=about.id,
        address=config.advertise or address,
        incarnation=replica.incarnation,
        model=about.model,
        model_root=about.model_root,
        page_size=about.page_size,
        kv_dtype=replica.kv_dtype,
        format_version=FORMAT_VERSION,
        tiers=tuple(tier.value for tier in about.tiers),
        version=version("jkv"),
        store=None if store is None else StoreRef(url=store.url, token=store.token, owner=store.owner),
    )
