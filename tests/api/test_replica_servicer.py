"""The Replica service over a real socket; the engine behind it is scripted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.api.grpc_server import GrpcServer
from jkv.api.prompt import Backend
from jkv.api.replica_servicer import ReplicaServicer
from jkv.api.serving import Serving
from jkv.cache.pages import Tier
from jkv.cache.replica import ReplicaEvent, ReplicaLoad
from tests.api.doubles import ScriptedCache, ScriptedGenerator, ScriptedReplica

_CLIENTS = 8
_PART = 64 * 2**10  # more than gRPC sends to a client that reads nothing


class Endless(ScriptedReplica):
    """Has always something more to say, and keeps count of its streams."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = 0

    async def watch(self, incarnation: str, after: int) -> AsyncGenerator[ReplicaEvent, None]:
        self.streams += 1
        try:
            for number in range(1_000_000):
                added = {Tier.L1: [b"k" * _PART]}
                yield ReplicaEvent(incarnation="first", number=number, load=ReplicaLoad(), added=added)
        finally:
            self.streams -= 1

    async def fetch(self, model_root: bytes, keys: Sequence[bytes]) -> AsyncGenerator[bytes, None]:
        self.streams += 1
        try:
            while True:
                yield b"p" * _PART
        finally:
            self.streams -= 1


class GoneContext:
    """A call whose client went away so recently that gRPC has not cancelled the handler yet."""

    def __init__(self) -> None:
        self.aborted = False

    async def write(self, message: Any) -> None:
        raise cygrpc.ExecuteBatchError('Failed "execute_batch"')

    async def abort(self, *status: Any) -> None:
        self.aborted = True
        raise grpc.aio.AbortError


def _backend(replica: ScriptedReplica) -> Backend:
    return Backend(
        generator=ScriptedGenerator(),
        cache=ScriptedCache(),
        replica=replica,
        served_name="bytes",
        tokenizer=None,
        chat_template=None,
    )


def _leave(port: int, method: str, request: Any, number: int) -> None:
    """Reads a little, then goes: half of the clients cancel, half just close their connection."""
    with grpc.insecure_channel(
        f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        call = getattr(pb_grpc.ReplicaStub(channel), method)(request)
        for _ in range(number % 4 + 1):
            next(call)
        if number % 2:
            call.cancel()


streaming = pytest.mark.parametrize(
    ("method", "request_"),
    [("Watch", pb.WatchRequest()), ("FetchPages", pb.FetchPagesRequest(keys=b"k" * 16))],
)


@streaming
def test_a_client_that_goes_away_in_mid_stream_is_no_error(
    method: str, request_: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    replica = Endless()

    async def scenario() -> None:
        server = GrpcServer()
        port = await server.start("127.0.0.1", 0)
        await server.open(_backend(replica))
        await asyncio.gather(*(asyncio.to_thread(_leave, port, method, request_, n) for n in range(_CLIENTS)))
        while replica.streams:
            await asyncio.sleep(0.01)
        await server.stop()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@streaming
def test_a_write_that_finds_the_client_gone_ends_the_handler_as_cancelled(
    method: str, request_: Any, caplog: pytest.LogCaptureFixture
) -> None:
    serving, replica, context = Serving(), Endless(), GoneContext()
    serving.open(_backend(replica))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(getattr(ReplicaServicer(serving), method)(request_, context))
    assert not replica.streams
    assert not context.aborted
    assert not caplog.records
