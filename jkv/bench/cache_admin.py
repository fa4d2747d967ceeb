"""The Cache service of a jkv server, as benchmarks use it: what it holds, emptying tiers, moving pages."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import grpc

from jkv.api import jkv_pb2, jkv_pb2_grpc
from jkv.bench.clients import Client, TargetError
from jkv.bench.grpc_client import GrpcClient, reason
from jkv.bench.load import Prompt
from jkv.errors import ConfigError

T = TypeVar("T")


class CacheAdmin:
    """Calls on the channel of a `GrpcClient`; every method raises TargetError where the server refuses."""

    def __init__(self, client: Client) -> None:
        """Raises ConfigError for a target that is no jkv server."""
        if not isinstance(client, GrpcClient):
            raise ConfigError("--target: needs jkv's gRPC API, grpc://HOST:PORT")
        self._stub: Any = jkv_pb2_grpc.CacheStub(client.channel)

    async def tiers(self) -> dict[str, jkv_pb2.TierStats]:
        """The tiers that are on, by name."""
        answer = await _answer("Stats", self._stub.Stats(jkv_pb2.CacheStatsRequest()))
        return {tier.tier: tier for tier in answer.tiers}

    async def flush(self, tiers: Sequence[str]) -> None:
        """Drops all pages of these tiers."""
        await _answer("Flush", self._stub.Flush(jkv_pb2.FlushRequest(tiers=tiers)))

    async def drain(self) -> None:
        """Returns when every background write is published."""
        await _answer("Drain", self._stub.Drain(jkv_pb2.DrainRequest()))

    async def demote(self, tier: str) -> int:
        """Moves a tier's pages into the one below; returns how many."""
        return (await _answer("Demote", self._stub.Demote(jkv_pb2.DemoteRequest(tier=tier)))).pages

    async def prefetch(self, prompt: Prompt, tier: str) -> int:
        """Brings a prompt's pages up into a tier; returns how many of its tokens are there."""
        prefix = jkv_pb2.Prefix(token_ids=jkv_pb2.TokenIds(ids=prompt))
        request = jkv_pb2.PrefetchRequest(prefix=prefix, tier=tier)
        return (await _answer("Prefetch", self._stub.Prefetch(request))).tokens


async def _answer(name: str, call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise TargetError(f"--target: Cache.{name}: {reason(error)}") from error
