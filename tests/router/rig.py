"""A router in front of doubles, and a client of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.router.config import RouterConfig
from jkv.router.membership import StaticMembers
from jkv.router.server import Router
from tests.router.doubles import Double, doubles

PROMPT = list(b"the quick brown fox jumps over the lazy dog")


@dataclass(kw_only=True)
class Reply:
    """What a client has received of one call."""

    chunks: list[pb.GenerateChunk]
    code: grpc.StatusCode
    details: str
    initial: dict[str, str]
    trailing: list[tuple[str, str]]

    def text(self, index: int = 0) -> str:
        return "".join(chunk.text for chunk in self.chunks if chunk.index == index)

    def ids(self, index: int = 0) -> list[int]:
        return [token for chunk in self.chunks if chunk.index == index for token in chunk.token_ids]

    def logprobs(self, index: int = 0) -> list[tuple[int, float]]:
        return [(one.id, one.logprob) for c in self.chunks if c.index == index for one in c.logprobs]

    def last(self, index: int = 0) -> pb.GenerateChunk:
        return [chunk for chunk in self.chunks if chunk.index == index][-1]

    def engines(self) -> list[str]:
        return [value for key, value in self.trailing if key == "jkv-engine"]

    def answer(self, index: int = 0) -> tuple[Any, ...]:
        """All of an answer that must not depend on which engines gave it."""
        usage = self.last(index).usage
        return (
            self.text(index),
            self.ids(index),
            self.logprobs(index),
            self.last(index).finish_reason,
            usage.prompt_tokens,
            usage.completion_tokens,
        )


class Rig:
    """`tell` is called with each chunk that the client receives."""

    def __init__(self, router: Router, address: str) -> None:
        self.router, self.address = router, address
        self._channel = grpc.aio.insecure_channel(address)
        self.generation: Any = pb_grpc.GenerationStub(self._channel)
        self.service: Any = pb_grpc.RouterStub(self._channel)
        self.channel = self._channel

    async def close(self) -> None:
        await self._channel.close(None)

    async def generate(
        self,
        request: pb.GenerateRequest,
        *,
        timeout: float | None = 20,
        tell: Callable[[pb.GenerateChunk], None] = lambda chunk: None,
    ) -> Reply:
        call = self.generation.Generate(request, timeout=timeout)
        chunks: list[pb.GenerateChunk] = []
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for chunk in call:
                chunks.append(chunk)
                tell(chunk)
        return Reply(
            chunks=chunks,
            code=await call.code(),
            details=await call.details(),
            initial=dict(await call.initial_metadata()),
            trailing=list(await call.trailing_metadata()),
        )

    async def status(self) -> dict[str, pb.EngineStatus]:
        answer = await self.service.Status(pb.RouterStatusRequest())
        return {engine.id: engine for engine in answer.engines}


@asynccontextmanager
async def rig_for(engines: list[Double], **flags: Any) -> AsyncGenerator[Rig, None]:
    """A router of these engines, once it follows all of them."""
    addresses = [engine.address for engine in engines]
    config = RouterConfig(engines=",".join(addresses), **flags)
    router = Router(config, StaticMembers(addresses))
    rig = Rig(router, f"127.0.0.1:{await router.start('127.0.0.1', 0)}")
    try:
        await until(
            lambda: (
                len([e for e in router._fleet.engines if e.self_test.verdict != "pending"]) == len(engines)
            )
        )
        for engine in engines:
            engine.requests.clear()
        yield rig
    finally:
        await rig.close()
        await router.stop(0.5)


@asynccontextmanager
async def cluster(*ids: str, **flags: Any) -> AsyncGenerator[tuple[Rig, list[Double]], None]:
    """Some doubles and a router."""
    async with doubles(*ids) as engines, rig_for(engines, **flags) as rig:
        yield rig, engines


async def until(condition: Callable[[], Any], seconds: float = 10) -> None:
    """Return once the condition holds; fails if it takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        await asyncio.sleep(0.01)


def prompt(ids: list[int] = PROMPT, **sampling: Any) -> pb.GenerateRequest:
    """Greedy unless `sampling` says otherwise."""
    fields = {"max_tokens": 24, "temperature": 0.0, **sampling}
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=pb.Sampling(**fields))
