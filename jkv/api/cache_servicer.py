"""The Cache service: what operators ask of the KV cache, checked and put into its terms."""

from __future__ import annotations

import functools
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.api.loopback import is_loopback
from jkv.api.prompt import Backend
from jkv.api.serving import Context, Serving, answering
from jkv.api.validate import check_cache_salt, check_token_ids
from jkv.cache.control import CacheStats, Prefix, TierStats
from jkv.cache.pages import Tier
from jkv.errors import InvalidRequestError, PermissionDeniedError

R = TypeVar("R")

_UPPER_TIERS = (Tier.L1, Tier.L2)


def _local(method: Callable[..., Awaitable[R]]) -> Callable[..., Awaitable[R]]:
    """Refuse callers from other machines: they could empty the cache, and look for others' prompts in it."""

    @functools.wraps(method)
    async def handle(self: CacheServicer, request: object, context: Context) -> R:
        if not is_loopback(context.peer()):
            raise PermissionDeniedError(
                "the Cache service answers only callers on the server's own machine; "
                f"call it there at a loopback address, not from {context.peer()}"
            )
        return await method(self, request, context)

    return answering(handle)


class CacheServicer(pb_grpc.CacheServicer):
    """Answers UNAVAILABLE while `serving` has no model."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    @_local
    async def Stats(self, request: pb.CacheStatsRequest, context: Context) -> pb.CacheStatsResponse:
        return _stats(await self._serving.backend().cache.cache_stats())

    @_local
    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        backend, prefix = await self._prefix(request, full_page=False)
        tokens = await backend.cache.lookup(prefix)
        return pb.LookupResponse(
            prompt_tokens=len(prefix.token_ids),
            cached_tokens=sum(tokens.values()),
            cached_by_tier=pb.CachedByTier(**{tier.value: count for tier, count in tokens.items()}),
        )

    @_local
    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        ttl = request.ttl_s if request.HasField("ttl_s") else None
        if ttl is not None and not 0 < ttl < math.inf:
            raise InvalidRequestError("ttl_s", f"must be a finite number greater than 0, got {ttl:g}")
        backend, prefix = await self._prefix(request)
        return pb.PinResponse(pages=await backend.cache.pin(prefix, ttl))

    @_local
    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:
        backend, prefix = await self._prefix(request)
        return pb.UnpinResponse(pages=await backend.cache.unpin(prefix))

    @_local
    async def Prefetch(self, request: pb.PrefetchRequest, context: Context) -> pb.PrefetchResponse:
        tier = _tier("tier", request.tier, _UPPER_TIERS)
        backend, prefix = await self._prefix(request)
        return pb.PrefetchResponse(tokens=await backend.cache.prefetch(prefix, tier))

    @_local
    async def Demote(self, request: pb.DemoteRequest, context: Context) -> pb.DemoteResponse:
        tier = _tier("tier", request.tier, _UPPER_TIERS)
        return pb.DemoteResponse(pages=await self._serving.backend().cache.demote(tier))

    @_local
    async def Flush(self, request: pb.FlushRequest, context: Context) -> pb.FlushResponse:
        if not request.tiers:
            raise InvalidRequestError("tiers", f"name at least one of {_names(tuple(Tier))}")
        tiers = [_tier(f"tiers[{index}]", name) for index, name in enumerate(request.tiers)]
        pages = await self._serving.backend().cache.flush(tuple(dict.fromkeys(tiers)))
        return pb.FlushResponse(pages={tier.value: count for tier, count in pages.items()})

    @_local
    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        await self._serving.backend().cache.drain_writes()
        return pb.DrainResponse()

    @_local
    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictResponse:
        target = request.WhichOneof("target")
        if target is None:
            raise InvalidRequestError("target", "one of prefix or cache_salt is required")
        if target == "cache_salt":
            check_cache_salt(request.cache_salt)
            cache = self._serving.backend().cache
            return pb.EvictResponse(pages=await cache.evict(None, request.cache_salt))
        backend, prefix = await self._prefix(request)
        return pb.EvictResponse(pages=await backend.cache.evict(prefix, None))

    async def _prefix(
        self,
        request: pb.LookupRequest | pb.PinRequest | pb.UnpinRequest | pb.PrefetchRequest | pb.EvictRequest,
        *,
        full_page: bool = True,
    ) -> tuple[Backend, Prefix]:
        """A request's prefix as tokens, and the backend that serves it.

        Raises:
            InvalidRequestError: no usable input, or where a full page is needed, less than that.
        """
        asked = request.prefix
        backend = self._serving.backend(asked.model)
        check_cache_salt(asked.cache_salt, "prefix.cache_salt")
        try:
            ids = await self._serving.prompt_ids(asked, backend)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"prefix.{error.field}", error.reason) from None
        info = backend.generator.info
        check_token_ids(f"prefix.{asked.WhichOneof('input')}", ids, info.vocab_size)
        if full_page and len(ids) < info.page_size:
            raise InvalidRequestError(
                "prefix", f"must have a full page of {info.page_size} tokens, has {len(ids)}"
            )
        return backend, Prefix(token_ids=ids, cache_salt=asked.cache_salt)


def _tier(field: str, name: str, allowed: Sequence[Tier] = tuple(Tier)) -> Tier:
    if name not in allowed:
        raise InvalidRequestError(field, f"must be one of {_names(allowed)}, got {name!r}")
    return Tier(name)


def _names(tiers: Sequence[Tier]) -> str:
    return ", ".join(tiers)


def _stats(stats: CacheStats) -> pb.CacheStatsResponse:
    return pb.CacheStatsResponse(
        tiers=[_tier_stats(tier, stats.tiers[tier]) for tier in Tier if tier in stats.tiers],
        pending_writes=stats.pending_writes,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        gated_loads=stats.gated_loads,
        late_loads=stats.late_loads,
    )


def _tier_stats(tier: Tier, stats: TierStats) -> pb.TierStats:
    return pb.TierStats(
        tier=tier.value,
        pages=stats.pages,
        pages_capacity=stats.pages_capacity,
        bytes=stats.bytes,
        bytes_capacity=stats.bytes_capacity,
        pinned_pages=stats.pinned_pages,
        hits=stats.hits,
        misses=stats.misses,
        hit_tokens=stats.hit_tokens,
        evictions=stats.evictions,
        loads=stats.loads,
        stores=stats.stores,
        drops=stats.drops,
        quarantined=stats.quarantined,
        errors_by_reason=stats.errors,
        read_bytes_per_s=stats.read_bytes_per_s,
        write_bytes_per_s=stats.write_bytes_per_s,
        breaker=stats.breaker,
    )
