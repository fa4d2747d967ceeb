"""L3 pages whose own engine cannot be asked, for the engines that see the same store.

An engine tells routers all that it can read, also of other owners. What it cannot tell yet is what an engine
that has just died, or has not connected yet, wrote last: that is taken from what the engine itself told
before, or in a router that starts, from the record in etcd.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence

from jkv.cache.keys import KEY_BYTES
from jkv.cache.pages import Tier
from jkv.errors import JkvError
from jkv.router.backoff import Backoff
from jkv.router.engines import Engine
from jkv.router.etcd import Etcd
from jkv.router.etcd_ops import EtcdError
from jkv.router.fleet import Fleet
from jkv.router.membership import Membership
from jkv.router.records import StoreRef
from jkv.router.shards import ShardPages, read_shards
from jkv.router.view import View

log = logging.getLogger(__name__)

# By then engines have listed their stores (a minute at most), which tells more than the record.
_KEPT_S = 120.0
_KEYS_AT_ONCE = 2**11  # as many as an engine's event has: two milliseconds


class SharedL3:
    """Owner: the event loop."""

    def __init__(self, fleet: Fleet, membership: Membership, view: View, etcd: Etcd, cluster: str) -> None:
        self._fleet, self._membership, self._view = fleet, membership, view
        self._etcd, self._cluster = etcd, cluster
        self._recorded: dict[StoreRef, str] = {}  # the writing engine's id, of what was read from etcd

    def readable(self, engines: Sequence[Engine]) -> list[tuple[str, ...]]:
        """For each of these, holders, in the index, of L3 pages that it can read and does not tell of."""
        holders = self._by_token()
        if not holders:
            return [()] * len(engines)
        stores = [self._store(engine.name) for engine in engines]
        return [() if store is None else tuple(holders[store.token]) for store in stores]

    def _by_token(self) -> defaultdict[str, list[str]]:
        """Holders of what engines that are away have written, by the store's token."""
        holders: defaultdict[str, list[str]] = defaultdict(list)
        for engine in self._fleet.engines:
            if not engine.synced and (store := self._store(engine.name)) is not None:
                holders[store.token].append(engine.holder)
        followed = self._followed() if self._recorded else ()
        for shard, writer in self._recorded.items():
            if writer not in followed:
                holders[shard.token].append(_holder(shard))
        return holders

    async def run(self) -> None:
        """Reads the record once, and forgets it when it has served; until cancelled."""
        await self._read()
        await asyncio.sleep(_KEPT_S)
        for shard in self._recorded:
            self._view.drop(_holder(shard))
        self._recorded.clear()
        await asyncio.Event().wait()

    async def _read(self) -> None:
        backoff = Backoff(first=0.2, most=5.0)
        while True:
            try:
                async for piece in read_shards(self._etcd, self._cluster):
                    await self._take(piece)
                return
            except EtcdError as error:
                log.debug("the record of L3's pages cannot be read at the moment: %s", error)
                await asyncio.sleep(backoff.next())
            except JkvError as error:  # the index is full
                log.warning("not all of the record of L3's pages is used: %s", error)
                return

    async def _take(self, piece: ShardPages) -> None:
        shard = piece.shard
        if shard.engine in self._followed():
            return
        self._recorded[shard.store] = shard.engine
        pages = self._view.holder(_holder(shard.store))
        for start in range(0, len(piece.keys), _KEYS_AT_ONCE * KEY_BYTES):
            pages.update(Tier.L3, piece.keys[start : start + _KEYS_AT_ONCE * KEY_BYTES], b"")
            await asyncio.sleep(0)

    def _followed(self) -> set[str]:
        """Engines that tell of their pages themselves."""
        return {engine.name for engine in self._fleet.engines if engine.synced}

    def _store(self, name: str) -> StoreRef | None:
        member = self._membership.members.get(name)
        return None if member is None or member.record is None else member.record.store


def _holder(shard: StoreRef) -> str:
    return f"shard-{shard.token}-{shard.owner}"
