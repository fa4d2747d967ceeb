"""The Cache service over a real socket; the cache behind it is scripted."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.api.grpc_server import CACHE_SERVICE, GrpcServer
from jkv.api.prompt import Backend
from jkv.api.validate import MAX_CACHE_SALT_LENGTH
from jkv.cache.control import Prefix
from jkv.cache.pages import Tier
from jkv.errors import FailedPreconditionError, InvalidRequestError
from jkv.text.chat import ChatTemplate
from tests.api.doubles import INFO, ScriptedCache, ScriptedGenerator, ScriptedReplica, byte_tokenizer

TOKENIZER = byte_tokenizer()
PAGE = "x" * INFO.page_size
PREFIX = pb.Prefix(prompt=PAGE)


@dataclass(frozen=True)
class Service:
    server: GrpcServer
    address: str
    channel: grpc.aio.Channel
    stub: Any  # the generated stubs have no types
    cache: ScriptedCache


@asynccontextmanager
async def _service(*, host: str = "127.0.0.1", ready: bool = True) -> AsyncIterator[Service]:
    cache, server = ScriptedCache(), GrpcServer()
    port = await server.start(host, 0)
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", None, None)
    if ready:
        await server.open(
            Backend(
                generator=ScriptedGenerator(),
                cache=cache,
                replica=ScriptedReplica(),
                served_name="bytes",
                tokenizer=TOKENIZER,
                chat_template=template,
            )
        )
    address = f"127.0.0.1:{port}"
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield Service(server, address, channel, pb_grpc.CacheStub(channel), cache)
    finally:
        await server.stop()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(scenario(), 20.0)

    asyncio.run(limited())


async def _refusal(answer: Awaitable[Any]) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await answer
    return error.value.code().name, error.value.details() or ""


def test_stats_carry_every_figure_of_every_tier_nearest_first() -> None:
    async def scenario() -> None:
        async with _service() as service:
            answer = await service.stub.Stats(pb.CacheStatsRequest())
        assert (answer.pending_writes, answer.prefill_tokens_per_s) == (4, 812.5)
        assert (answer.gated_loads, answer.late_loads) == (5, 6)
        l1, l3 = answer.tiers
        assert l1 == pb.TierStats(
            tier="l1", pages=10, pages_capacity=100, hits=11, hit_tokens=88, breaker="closed"
        )
        assert l3 == pb.TierStats(
            tier="l3",
            pages=30,
            pages_capacity=300,
            bytes=30 * 2**20,
            bytes_capacity=300 * 2**20,
            pinned_pages=3,
            hits=31,
            misses=32,
            hit_tokens=248,
            evictions=33,
            loads=34,
            stores=35,
            drops=36,
            quarantined=1,
            errors_by_reason={"checksum": 1, "timeout": 2},
            read_bytes_per_s=1.5 * 2**30,
            breaker="half-open",
        )

    run(scenario)


@pytest.mark.parametrize(
    ("prefix", "ids"),
    [
        (pb.Prefix(prompt="héllo"), "héllo".encode()),
        (pb.Prefix(token_ids=pb.TokenIds(ids=[1, 2, 3])), bytes([1, 2, 3])),
        (pb.Prefix(messages=pb.Messages(messages=[pb.Message(role="user", content="x")])), b"[user]x"),
    ],
)
def test_lookup_takes_what_generate_takes(prefix: pb.Prefix, ids: bytes) -> None:
    async def scenario() -> None:
        prefix.cache_salt, prefix.model = "s", "bytes"
        async with _service() as service:
            answer = await service.stub.Lookup(pb.LookupRequest(prefix=prefix))
        assert service.cache.calls == [("lookup", Prefix(token_ids=tuple(ids), cache_salt="s"))]
        assert (answer.prompt_tokens, answer.cached_tokens) == (len(ids), 24)
        assert answer.cached_by_tier == pb.CachedByTier(l1=8, l3=16)

    run(scenario)


def test_each_call_reaches_the_cache_and_answers_its_count() -> None:
    prefix = Prefix(token_ids=tuple(PAGE.encode()))

    async def scenario() -> None:
        async with _service() as service:
            stub, calls = service.stub, service.cache.calls
            assert (await stub.Pin(pb.PinRequest(prefix=PREFIX))).pages == 3
            assert (await stub.Pin(pb.PinRequest(prefix=PREFIX, ttl_s=0.5))).pages == 3
            assert (await stub.Unpin(pb.UnpinRequest(prefix=PREFIX))).pages == 2
            assert (await stub.Prefetch(pb.PrefetchRequest(prefix=PREFIX, tier="l2"))).tokens == 24
            assert (await stub.Demote(pb.DemoteRequest(tier="l1"))).pages == 7
            flushed = await stub.Flush(pb.FlushRequest(tiers=["l3", "l1", "l3"]))
            assert dict(flushed.pages) == {"l3": 10, "l1": 20}
            assert await stub.Drain(pb.DrainRequest()) == pb.DrainResponse()
            assert (await stub.Evict(pb.EvictRequest(prefix=PREFIX))).pages == 5
            assert (await stub.Evict(pb.EvictRequest(cache_salt=""))).pages == 5
            assert (await stub.Evict(pb.EvictRequest(cache_salt="s"))).pages == 5
        assert calls == [
            ("pin", prefix, None),
            ("pin", prefix, 0.5),
            ("unpin", prefix),
            ("prefetch", prefix, Tier.L2),
            ("demote", Tier.L1),
            ("flush", (Tier.L3, Tier.L1)),
            ("drain_writes",),
            ("evict", prefix, None),
            ("evict", None, ""),
            ("evict", None, "s"),
        ]

    run(scenario)


@pytest.mark.parametrize(
    ("method", "request_", "details"),
    [
        ("Lookup", pb.LookupRequest(), "prefix.input: one of prompt or token_ids or messages is required"),
        ("Lookup", pb.LookupRequest(prefix=pb.Prefix(prompt="")), "prefix.prompt: must not be empty"),
        (
            "Lookup",
            pb.LookupRequest(prefix=pb.Prefix(token_ids=pb.TokenIds(ids=[1, 257]))),
            "prefix.token_ids[1]: must be below the vocabulary size 257, got 257",
        ),
        (
            "Lookup",
            pb.LookupRequest(prefix=pb.Prefix(prompt="x", cache_salt="s" * (MAX_CACHE_SALT_LENGTH + 1))),
            "prefix.cache_salt: must have at most 256 characters, has 257",
        ),
        (
            "Pin",
            pb.PinRequest(prefix=pb.Prefix(prompt="x")),
            "prefix: must have a full page of 8 tokens, has 1",
        ),
        (
            "Pin",
            pb.PinRequest(prefix=PREFIX, ttl_s=0),
            "ttl_s: must be a finite number greater than 0, got 0",
        ),
        (
            "Pin",
            pb.PinRequest(prefix=PREFIX, ttl_s=-1),
            "ttl_s: must be a finite number greater than 0, got -1",
        ),
        (
            "Pin",
            pb.PinRequest(prefix=PREFIX, ttl_s=float("nan")),
            "ttl_s: must be a finite number greater than 0, got nan",
        ),
        ("Unpin", pb.UnpinRequest(prefix=pb.Prefix(prompt="x")), "prefix: must have a full page of 8 tokens"),
        ("Prefetch", pb.PrefetchRequest(prefix=PREFIX, tier="l3"), "tier: must be one of l1, l2, got 'l3'"),
        ("Prefetch", pb.PrefetchRequest(prefix=PREFIX), "tier: must be one of l1, l2, got ''"),
        ("Demote", pb.DemoteRequest(tier="l3"), "tier: must be one of l1, l2, got 'l3'"),
        ("Flush", pb.FlushRequest(), "tiers: name at least one of l1, l2, l3"),
        ("Flush", pb.FlushRequest(tiers=["l1", "L4"]), "tiers[1]: must be one of l1, l2, l3, got 'L4'"),
        ("Evict", pb.EvictRequest(), "target: one of prefix or cache_salt is required"),
        ("Evict", pb.EvictRequest(prefix=pb.Prefix(prompt="x")), "prefix: must have a full page of 8 tokens"),
        ("Evict", pb.EvictRequest(cache_salt="s" * 257), "cache_salt: must have at most 256 characters"),
    ],
)
def test_bad_requests_are_explained_and_never_reach_the_cache(
    method: str, request_: Any, details: str
) -> None:
    async def scenario() -> None:
        async with _service() as service:
            code, said = await _refusal(getattr(service.stub, method)(request_))
        assert code == "INVALID_ARGUMENT"
        assert said.startswith(details)
        assert service.cache.calls == []

    run(scenario)


def test_another_model_and_bytes_that_are_no_message_are_refused() -> None:
    async def scenario() -> None:
        async with _service() as service:
            request = pb.LookupRequest(prefix=pb.Prefix(prompt="x", model="other"))
            assert (await _refusal(service.stub.Lookup(request)))[0] == "NOT_FOUND"
            raw = service.channel.unary_unary(f"/{CACHE_SERVICE}/Lookup")(b"\x0a\x04\x0a\x02\xc3\x28")
            assert await _refusal(raw) == ("INVALID_ARGUMENT", "prefix.prompt: is not valid UTF-8")

    run(scenario)


@pytest.mark.parametrize(
    ("failure", "code", "details"),
    [
        (InvalidRequestError("tier", "l2 is off"), "INVALID_ARGUMENT", "tier: l2 is off"),
        (FailedPreconditionError("16 requests run"), "FAILED_PRECONDITION", "16 requests run"),
        (ValueError("secret"), "INTERNAL", "unexpected ValueError; the server's log has the traceback"),
    ],
)
def test_what_the_cache_refuses_becomes_a_status(failure: Exception, code: str, details: str) -> None:
    async def scenario() -> None:
        async with _service() as service:
            service.cache.failure = failure
            assert await _refusal(service.stub.Demote(pb.DemoteRequest(tier="l2"))) == (code, details)

    run(scenario)


def test_calls_wait_for_the_model_and_other_calls_pass_one_that_waits() -> None:
    async def scenario() -> None:
        async with _service(ready=False) as service:
            code, details = await _refusal(service.stub.Stats(pb.CacheStatsRequest()))
            assert (code, details) == ("UNAVAILABLE", "the model is still loading")
        async with _service() as service:
            service.cache.release.clear()
            draining = asyncio.ensure_future(service.stub.Drain(pb.DrainRequest()))
            assert (await service.stub.Demote(pb.DemoteRequest(tier="l1"))).pages == 7
            assert not draining.done()
            service.cache.release.set()
            await draining

    run(scenario)


def _own_address() -> str | None:
    """An address of this machine other than loopback; asking for a route sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation
        except OSError:
            return None
        return probe.getsockname()[0]


def test_callers_that_are_not_local_are_refused_and_may_still_generate() -> None:
    own = _own_address()
    if own is None:
        pytest.skip("this machine has no address but loopback")

    async def scenario() -> None:
        async with _service(host="0.0.0.0") as service:
            assert (await service.stub.Stats(pb.CacheStatsRequest())).tiers
            port = service.address.rpartition(":")[2]
            async with grpc.aio.insecure_channel(f"{own}:{port}") as channel:
                stub: Any = pb_grpc.CacheStub(channel)
                code, details = await _refusal(stub.Flush(pb.FlushRequest(tiers=["l1"])))
                assert code == "PERMISSION_DENIED"
                assert own in details
                generation: Any = pb_grpc.GenerationStub(channel)
                assert (await generation.ListModels(pb.ListModelsRequest())).models
        assert service.cache.calls == [("cache_stats",)]

    run(scenario)
