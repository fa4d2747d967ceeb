"""The cluster benchmark on real engines behind real routers, scaled down, and the speeds of such an engine.

Everything runs on this machine. The load is that of the simulation, its prompts of an eighth of their length.
Each engine's L1 can hold a third of the groups, and there is no other tier.
"""

from __future__ import annotations

import asyncio
import random
import shlex
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import islice

import grpc
import numpy as np

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.bench.cache_admin import CacheAdmin
from jkv.bench.clients import TargetError
from jkv.bench.cluster_engine import Speeds
from jkv.bench.cluster_load import Groups
from jkv.bench.cluster_results import PolicyResults
from jkv.bench.drive import Target, closed_loop, connected
from jkv.bench.engine_process import EngineProcess
from jkv.bench.ideal import IdealCache
from jkv.bench.load import Prompt, PromptShape, prompts
from jkv.bench.metrics import Record
from jkv.router.policy import POLICIES

_PAGE = 64
_SCALE = 8
_SLOTS = 4  # of an engine; so many requests are in flight for each
_GROUPS_PER_ENGINE = 3
_SPEED_PROMPTS = 3
_SPEED_OUTPUT = 16
_READY_S = 60.0
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class RealOptions:
    """What the flags of `python -m jkv.bench cluster` say of real engines."""

    engines: int
    serve_flags: str
    requests: int
    seed: int
    timeout: float


@dataclass(frozen=True, kw_only=True)
class _Engine:
    address: str
    target: Target


@dataclass(frozen=True, kw_only=True)
class RealResults:
    """Hits are compared with an infinite cache that all engines share; `speeds` are of one engine alone."""

    model: str
    engines: int
    requests: int
    prompt_tokens: int
    pages_of_an_engine: int
    speeds: Speeds
    policies: list[PolicyResults]
    errors: list[str]


def scaled(engines: int) -> Groups:
    """The groups of the simulation's load, for fewer engines and with shorter prompts."""
    full = Groups()
    return Groups(
        groups=_GROUPS_PER_ENGINE * engines,
        shared_tokens=full.shared_tokens // _SCALE // _PAGE * _PAGE,
        own_tokens=full.own_tokens // _SCALE,
        output_tokens=full.output_tokens // _SCALE,
        page_size=_PAGE,
    )


def group_prompts(shape: Groups, requests: int, vocab_size: int, seed: int) -> list[Prompt]:
    """Each belongs to a group, drawn evenly, as in `cluster_load.group_load`."""
    chance, draw = random.Random(seed), np.random.default_rng(seed)

    def tokens(count: int) -> Prompt:
        return tuple(draw.integers(vocab_size, size=count).tolist())

    shared = [tokens(shape.shared_tokens) for _ in range(shape.groups)]
    return [chance.choice(shared) + tokens(shape.own_tokens) for _ in range(requests)]


async def measure(options: RealOptions) -> RealResults:
    """First one engine's speeds, then all policies.

    Raises:
        TargetError: an engine or a router does not start.
        ConfigError: flags that an engine refuses.
    """
    shape = scaled(options.engines)
    speeds = await _speeds(options, shape.shared_tokens + shape.own_tokens)
    pages = (shape.shared_tokens + shape.own_tokens) // _PAGE
    capacity = -(-shape.groups // 3) * pages
    # What running requests need beside what is cached.
    room = _SLOTS * -(-(shape.own_tokens + shape.output_tokens + _PAGE) // _PAGE)
    async with _engines(options, capacity + room) as engines:
        first = engines[0]
        load = group_prompts(shape, options.requests, first.target.vocab_size, options.seed)
        runs: dict[str, list[Record]] = {name: [] for name in POLICIES}
        seconds = dict.fromkeys(POLICIES, 0.0)
        # There and back, so that a machine that slows down does it to all.
        for name in (*POLICIES, *reversed(POLICIES)):
            records = await _run(options, engines, name, load, shape.output_tokens)
            runs[name] += records
            seconds[name] += max(r.ended_at for r in records) - min(r.sent_at for r in records)
        ideal = IdealCache(_PAGE)
        possible = 0
        for prompt in load:
            possible += ideal.hit_tokens(prompt)
            ideal.add(prompt, ())
        return RealResults(
            model=first.target.info.model,
            engines=options.engines,
            requests=2 * len(load),
            prompt_tokens=2 * sum(map(len, load)),
            pages_of_an_engine=capacity,
            speeds=speeds,
            policies=[_summary(name, runs[name], 2 * possible, seconds[name]) for name in POLICIES],
            errors=[f"{name}: {r.error}" for name in POLICIES for r in runs[name] if not r.ok],
        )


def _summary(policy: str, records: Sequence[Record], ideal: int, seconds: float) -> PolicyResults:
    done = [record for record in records if record.ok]
    p50, p90 = np.percentile([record.ttft for record in done], [50, 90]).tolist() if done else (0.0, 0.0)
    return PolicyResults(
        policy=policy,
        hits_of_ideal=sum(record.cached_tokens or 0 for record in done) / max(ideal, 1),
        ttft_p50=p50,
        ttft_p90=p90,
        requests_per_s=len(done) / seconds,
    )


async def _run(
    options: RealOptions, engines: Sequence[_Engine], policy: str, load: Sequence[Prompt], output_len: int
) -> list[Record]:
    """The load through a router of this policy; caches start empty, and all slots are always in use."""
    for engine in engines:
        await CacheAdmin(engine.target.client).flush(["l1"])
    addresses = ",".join(engine.address for engine in engines)
    flags = ("--engines", addresses, "--policy", policy)
    async with AsyncExitStack() as stack:
        process, address = await EngineProcess.start(flags, module="jkv.router")
        stack.push_async_callback(process.stop)
        await _all_serve(address, len(engines))
        router = await stack.enter_async_context(_connected(address, options))
        return await closed_loop(router, load, output_len, _SLOTS * len(engines))


async def _all_serve(address: str, engines: int) -> None:
    """Returns once a router can use all engines, and has tested them."""
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(_READY_S):
        stub = pb_grpc.RouterStub(channel)
        while True:
            status = await stub.Status(pb.RouterStatusRequest())
            usable = [one for one in status.engines if one.state == "serving" and one.self_test != "pending"]
            if len(usable) == engines:
                return
            await asyncio.sleep(_POLL_S)


async def _speeds(options: RealOptions, length: int) -> Speeds:
    """Of one engine that has nothing else to do: medians over some prompts of this length."""
    async with AsyncExitStack() as stack:
        engine = (await _engine(stack, options, ["--load-policy", "always"])).target
        admin = CacheAdmin(engine.client)
        shape = PromptShape(input_len=length, vocab_size=engine.vocab_size, seed=options.seed)
        records = []
        for prompt in islice(prompts(shape), _SPEED_PROMPTS):
            records.append(await engine.run(prompt, _SPEED_OUTPUT))
            await admin.flush(["l1"])
            records.append(await engine.run(prompt, 1))  # from L2
        if failed := [record.error for record in records if not record.ok]:
            raise TargetError(f"an engine whose speed was to be measured failed: {failed[0]}")
        cold = records[::2]
        tpot = statistics.median(record.tpot or 0.0 for record in cold)
        tiers = await admin.tiers()
        return Speeds(
            prefill_tokens_per_s=statistics.median(length / record.ttft for record in cold),
            l2_bytes_per_s=tiers["l2"].read_bytes_per_s,
            page_bytes=tiers["l1"].bytes_capacity // tiers["l1"].pages_capacity,
            tpot_s=tpot,
            slots=_SLOTS,
        )


@asynccontextmanager
async def _engines(options: RealOptions, l1_pages: int) -> AsyncIterator[list[_Engine]]:
    flags = ["--l2-gib", "0", "--l1-pages", str(l1_pages)]
    async with AsyncExitStack() as stack:
        yield [await _engine(stack, options, flags) for _ in range(options.engines)]


async def _engine(stack: AsyncExitStack, options: RealOptions, flags: Sequence[str]) -> _Engine:
    """Starts one, which ends with the stack; the user's flags win."""
    usual = ["--page-size", str(_PAGE), "--max-num-seqs", str(_SLOTS)]
    process, address = await EngineProcess.start([*usual, *flags, *shlex.split(options.serve_flags)])
    stack.push_async_callback(process.stop)
    return _Engine(address=address, target=await stack.enter_async_context(_connected(address, options)))


def _connected(address: str, options: RealOptions) -> AbstractAsyncContextManager[Target]:
    return connected(f"grpc://{address}", model=None, vocab_size=None, timeout_s=options.timeout)
