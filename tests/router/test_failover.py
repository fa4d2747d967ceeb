"""Engines that die, hang or give up under a request, behind a real router on real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from jkv.api import jkv_pb2 as pb
from jkv.engine.request import FinishReason
from tests.router.doubles import Double
from tests.router.rig import PROMPT, Reply, Rig, cluster, prompt, until

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True},
    "until its end token": {"max_tokens": 200},
    "seeded": {"temperature": 0.8, "seed": 2**64 - 1, "ignore_eos": True},
    "logprobs": {"ignore_eos": True, "logprobs": True},
    "several": {"ignore_eos": True, "n": 3, "temperature": 1.0, "seed": 2**64 - 2},
}


async def _hold(engines: list[Double], rig: Rig, request: pb.GenerateRequest, after: int) -> Any:
    """Send a request and wait until its engine has sent so many chunks; returns engine, other and call."""
    for engine in engines:
        engine.hold_after = after
    call = asyncio.create_task(rig.generate(request))
    await until(lambda: any(engine.held.is_set() for engine in engines))
    busy = next(engine for engine in engines if engine.held.is_set())
    other = next(engine for engine in engines if engine is not busy)
    other.hold_after = None
    return busy, other, call


async def _uninterrupted(rig: Rig, request: pb.GenerateRequest) -> Reply:
    reply = await rig.generate(request)
    assert reply.code is grpc.StatusCode.OK
    return reply


@pytest.mark.parametrize("after", [0, 1, 2, 7, 13])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_an_answer_is_the_same_whether_its_engine_dies_or_not(sampling: dict[str, Any], after: int) -> None:
    async def run() -> None:
        async with cluster("one", "two") as (rig, engines):
            request = prompt(**sampling)
            request.no_cache = True
            whole = await _uninterrupted(rig, request)
            busy, other, call = await _hold(engines, rig, request, after)
            await busy.kill()
            reply = await call
            assert reply.code is grpc.StatusCode.OK
            for index in range(request.sampling.n or 1):
                assert reply.answer(index) == whole.answer(index)
            served = [busy.description.id, other.description.id] if after else [other.description.id]
            assert reply.engines() == served
            assert reply.initial["jkv-engine"] == served[0]

    asyncio.run(run())


def test_the_first_engine_says_what_was_cached_and_the_second_one_is_told_where_to_go_on() -> None:
    async def run() -> None:
        async with cluster("one", "two") as (rig, engines):
            for engine in engines:
                engine.publish(engine.change("l1", engine.keys(PROMPT)[:2]))
            busy, other, call = await _hold(engines, rig, prompt(ignore_eos=True), 5)
            other.change("l1", other.keys(PROMPT))
            await busy.kill()
            reply = await call
            sent = other.requests[-1]
            assert list(sent.resume_token_ids) == reply.ids()[:5]
            assert sent.sampling.max_tokens == 24
            assert sent.request_id == f"{busy.requests[-1].request_id}~1"
            assert reply.last().usage.cached_tokens == reply.last().usage.cached_by_tier.l1 == 16
            assert [chunk.HasField("cached_by_tier") for chunk in reply.chunks] == [True] + 24 * [False]

    asyncio.run(run())


@pytest.mark.parametrize("after", range(0, 16, 3))
def test_a_stop_string_is_found_across_the_seam(after: int) -> None:
    async def run() -> None:
        async with cluster("one", "two") as (rig, engines):
            request = prompt(ignore_eos=True, max_tokens=60)
            request.no_cache = True
            text = (await _uninterrupted(rig, request)).text()
            request.sampling.stop.append(text[8:14])
            whole = await _uninterrupted(rig, request)
            assert whole.text() == text[:8]
            assert whole.last().finish_reason == "stop"
            busy, _, call = await _hold(engines, rig, request, after)
            await busy.kill()
            assert (await call).answer() == whole.answer()

    asyncio.run(run())


@pytest.mark.parametrize("end", [FinishReason.ERROR, FinishReason.CANCELLED])
def test_an_engine_that_gives_an_answer_up_is_left_without_the_text_that_it_let_go(end: FinishReason) -> None:
    async def run() -> None:
        async with cluster("one", "two") as (rig, engines):
            request = prompt(ignore_eos=True, max_tokens=60)
            request.no_cache = True
            text = (await _uninterrupted(rig, request)).text()
            # Held back when the engine gives up, and not the stop string after all.
            request.sampling.stop.append(text[4:10] + "?")
            whole = await _uninterrupted(rig, request)
            busy, other, call = await _hold(engines, rig, request, 9)
            busy.end = end
            busy.released.set()
            reply = await call
            assert reply.engines() == [busy.description.id, other.description.id]
            assert reply.answer() == whole.answer()

    asyncio.run(run())


def test_a_silent_engine_loses_its_requests_and_serves_again_when_it_speaks() -> None:
    async def run() -> None:
        async with cluster("one", "two", suspect_after=0.5) as (rig, engines):
            request = prompt(ignore_eos=True)
            request.no_cache = True
            whole = await _uninterrupted(rig, request)
            busy, other, call = await _hold(engines, rig, request, 4)
            busy.silent.set()
            reply = await call
            assert reply.answer() == whole.answer()
            assert reply.engines() == [busy.description.id, other.description.id]
            assert (await rig.status())[busy.description.id].state == "suspect"
            for _ in range(8):
                assert (await rig.generate(request)).engines() == [other.description.id]
            busy.hold_after = None
            busy.silent.clear()
            await until(lambda: all(engine.state == "serving" for engine in rig.router._fleet.engines))

    asyncio.run(run())


def test_a_silent_engine_keeps_its_requests_where_there_is_no_other() -> None:
    async def run() -> None:
        async with cluster("one", suspect_after=0.5) as (rig, (engine,)):
            engine.hold_after = 3
            call = asyncio.create_task(rig.generate(prompt(ignore_eos=True)))
            await engine.held.wait()
            engine.silent.set()
            engine.released.set()
            await until(lambda: rig.router._fleet.engines[0].state == "suspect")
            refused = await rig.generate(prompt())
            assert refused.code is grpc.StatusCode.UNAVAILABLE
            assert "one has been silent for" in refused.details
            engine.silent.clear()
            reply = await call
            assert (reply.code, len(reply.ids())) == (grpc.StatusCode.OK, 24)

    asyncio.run(run())


def test_without_another_engine_a_cut_answer_ends_with_an_error_that_says_so() -> None:
    async def run() -> None:
        async with cluster("one") as (rig, (engine,)):
            engine.hold_after = 6
            call = asyncio.create_task(rig.generate(prompt(ignore_eos=True)))
            await engine.held.wait()
            await engine.kill()
            reply = await call
            assert reply.code is grpc.StatusCode.UNAVAILABLE
            assert "one" in reply.details
            assert reply.last().finish_reason == "error"
            assert reply.last().usage.completion_tokens == len(reply.ids()) == 6
            assert reply.last().usage.prompt_tokens == len(PROMPT)

    asyncio.run(run())


def test_an_engine_that_fails_requests_is_avoided_and_one_that_fails_all_is_named() -> None:
    async def run() -> None:
        async with cluster("one", "two", policy="round-robin") as (rig, (one, two)):
            one.failing = True
            for _ in range(10):
                assert (await rig.generate(prompt())).code is grpc.StatusCode.OK
            assert (await rig.status())["one"].state == "failing"
            assert len(one.requests) < 6
            two.failing = True
            reply = await rig.generate(prompt())
            assert reply.code is grpc.StatusCode.INTERNAL
            assert reply.chunks == []
            # What fails everywhere is not tried everywhere again and again.
            assert len(one.requests) + len(two.requests) < 20

    asyncio.run(run())


def test_full_engines_are_passed_over_and_when_all_are_the_client_hears_when_to_try_again() -> None:
    async def run() -> None:
        async with cluster("one", "two", policy="round-robin") as (rig, (one, two)):
            one.full = True
            for _ in range(4):
                assert (await rig.generate(prompt())).engines() == ["two"]
            two.full = True
            reply = await rig.generate(prompt())
            assert reply.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert 0 < int(dict(reply.trailing)["retry-after-ms"]) <= 300
            assert (await rig.status())["one"].state == "serving"
            one.full = False
            await asyncio.sleep(0.35)
            assert (await rig.generate(prompt())).code is grpc.StatusCode.OK

    asyncio.run(run())


def test_a_new_process_is_not_blamed_for_the_failures_of_the_one_before() -> None:
    async def run() -> None:
        async with cluster("one", "two", policy="round-robin") as (rig, (one, two)):
            two.full = True
            one.failing = True
            for _ in range(4):
                await rig.generate(prompt())
            await until(lambda: rig.router._fleet.engines[0].state == "failing")
            await one.kill()
            one.failing = False
            await one.restart()
            await until(lambda: rig.router._fleet.engines[0].state == "serving")

    asyncio.run(run())


def test_a_restart_in_place_between_requests_is_not_seen_by_clients() -> None:
    async def run() -> None:
        async with cluster("one") as (rig, (engine,)):
            assert (await rig.generate(prompt())).code is grpc.StatusCode.OK
            await engine.kill()
            await engine.restart()
            reply = await rig.generate(prompt())
            assert reply.code is grpc.StatusCode.OK

    asyncio.run(run())
