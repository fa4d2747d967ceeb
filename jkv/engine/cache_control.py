"""The cache as asyncio code sees it: `CacheControl` over the engine's thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from jkv.cache.control import CacheStats, Prefix
from jkv.cache.keys import request_root
from jkv.cache.pages import PageInfo, Tier, page_infos
from jkv.engine.cache_admin import CacheAdmin
from jkv.engine.calls import ask, settled
from jkv.engine.loop import EngineLoop

R = TypeVar("R")


class EngineCache:
    """Implements `jkv.cache.control.CacheControl`. Safe to use from several event loops."""

    def __init__(self, loop: EngineLoop, admin: CacheAdmin, page_size: int) -> None:
        self._loop, self._admin, self._page_size = loop, admin, page_size

    async def cache_stats(self) -> CacheStats:
        return await ask(self._loop, self._admin.stats)

    async def lookup(self, prefix: Prefix) -> Mapping[Tier, int]:
        infos = self._infos(prefix)
        return await ask(self._loop, lambda: self._admin.lookup(infos, len(prefix.token_ids)))

    async def pin(self, prefix: Prefix, ttl_s: float | None) -> int:
        infos, until = self._infos(prefix), math.inf if ttl_s is None else time.monotonic() + ttl_s
        return await ask(self._loop, lambda: self._admin.pin(infos, until))

    async def unpin(self, prefix: Prefix) -> int:
        infos = self._infos(prefix)
        return await ask(self._loop, lambda: self._admin.unpin(infos))

    async def prefetch(self, prefix: Prefix, tier: Tier) -> int:
        infos = self._infos(prefix)
        return await self._later(lambda done: self._admin.prefetch(infos, tier, done))

    async def demote(self, tier: Tier) -> int:
        return await self._later(lambda done: self._admin.demote(tier, done))

    async def flush(self, tiers: Sequence[Tier]) -> Mapping[Tier, int]:
        return await self._later(lambda done: self._admin.flush(tiers, done))

    async def drain_writes(self) -> None:
        return await self._later(self._admin.drain)

    async def evict(self, prefix: Prefix | None, cache_salt: str | None) -> int:
        if prefix is not None:
            infos = self._infos(prefix)
            return await self._later(lambda done: self._admin.evict_prefix(infos, done))
        root = request_root(self._loop.model_root, cache_salt=cache_salt or "")
        return await self._later(lambda done: self._admin.evict_salt(root, done))

    def _infos(self, prefix: Prefix) -> list[PageInfo]:
        root = request_root(self._loop.model_root, cache_salt=prefix.cache_salt)
        return page_infos(root, root, prefix.token_ids, self._page_size)

    async def _later(self, start: Callable[[Callable[[R], None]], None]) -> R:
        return await settled(self._loop, self._loop.call(lambda future: start(future.set_result)))
