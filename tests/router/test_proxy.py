"""What clients of a router see: answers, metadata, refusals, deadlines, health, and the drain."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jkv.api import jkv_pb2 as pb
from jkv.client import main
from tests.router.doubles import Double, doubles
from tests.router.rig import PROMPT, Rig, cluster, prompt, rig_for, until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def _health(rig: Rig) -> int:
    stub: Any = health_pb2_grpc.HealthStub(rig.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest())).status


async def _becomes(rig: Rig, status: int) -> None:
    async with asyncio.timeout(10):
        while await _health(rig) != status:
            await asyncio.sleep(0.01)


def test_an_answer_is_the_engines_and_says_which_one_it_was() -> None:
    async def run() -> None:
        async with cluster("one") as (rig, (one,)):
            request = prompt(ignore_eos=True, logprobs=True, n=2)
            request.request_id = "mine"
            reply = await rig.generate(request, timeout=7)
            assert reply.initial["jkv-engine"] == "one"
            assert reply.engines() == ["one"]
            (sent,) = one.requests
            sent.sampling.ClearField("seed")  # the router's, as there is none
            assert sent == request
            (deadline,) = [one for one in one.deadlines[-1:] if one is not None]
            assert 5 < deadline < 7.1  # gRPC rounds up
            assert len(reply.ids(0)) == len(reply.ids(1)) == 24
            assert reply.last(1).usage.completion_tokens == 24

    asyncio.run(run())


def test_text_is_tokenized_once_and_passed_on_as_ids() -> None:
    async def run() -> None:
        async with cluster("one", "two") as (rig, engines):
            text = bytes(PROMPT).decode()
            by_text = pb.GenerateRequest(prompt=text, sampling=prompt().sampling)
            chat = pb.Messages(messages=[pb.Message(role="user", content=text)])
            by_chat = pb.GenerateRequest(messages=chat, sampling=prompt().sampling)
            for request in (by_text, by_text, by_chat, by_chat):
                await rig.generate(request)
            sent = [request for engine in engines for request in engine.requests]
            assert [list(request.token_ids.ids) for request in sent] == 4 * [PROMPT]
            assert sum(len(engine.tokenized) for engine in engines) == 2
            answer = await rig.generation.Tokenize(pb.TokenizeRequest(prompt=text))
            assert list(answer.ids) == PROMPT
            assert sum(len(engine.tokenized) for engine in engines) == 2
            assert (await rig.generation.Detokenize(pb.DetokenizeRequest(ids=PROMPT))).text == text
            (model,) = (await rig.generation.ListModels(pb.ListModelsRequest())).models
            assert model.name == "bytes"

    asyncio.run(run())


def test_tokenizing_goes_to_another_engine_where_one_has_died_or_says_nothing() -> None:
    async def run() -> None:
        async with cluster("one", "two", suspect_after=0.5) as (rig, (one, _)):

            async def never(request: Any, context: Any) -> None:
                one.silent.set()
                await asyncio.Event().wait()

            one.Tokenize = never  # type: ignore[method-assign]
            await one.kill()
            await one.restart()
            await until(lambda: all(engine.state == "serving" for engine in rig.router._fleet.engines))
            for number in range(4):
                answer = await rig.generation.Tokenize(pb.TokenizeRequest(prompt=f"text {number}"), timeout=8)
                assert bytes(answer.ids) == f"text {number}".encode()

    asyncio.run(run())


def test_an_engines_refusal_is_the_clients_answer_in_the_clients_words() -> None:
    async def run() -> None:
        async with cluster("one", "two") as (rig, engines):

            async def refuse(request: pb.GenerateRequest, context: Any) -> None:
                engines[0].requests.append(request)
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "token_ids: has 9 tokens; at most 8")

            for engine in engines:
                engine.Generate = refuse  # type: ignore[method-assign]
                await engine.kill()
                await engine.restart()
            await until(
                lambda: all(e.self_test.verdict.startswith("failed") for e in rig.router._fleet.engines)
            )
            engines[0].requests.clear()
            reply = await rig.generate(pb.GenerateRequest(prompt="some text"))
            assert (reply.code, reply.details) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "prompt: has 9 tokens; at most 8",
            )
            assert len(engines[0].requests) == 1
            assert (await rig.generate(prompt())).details == "token_ids: has 9 tokens; at most 8"
            reply = await rig.generate(pb.GenerateRequest())
            assert reply.details == "input: one of prompt or token_ids or messages is required"

    asyncio.run(run())


def test_a_client_that_leaves_frees_the_engine() -> None:
    async def run() -> None:
        async with cluster("one") as (rig, (one,)):
            one.hold_after = 3
            call = rig.generation.Generate(prompt())
            await one.held.wait()
            assert (await rig.status())["one"].in_flight == 1
            call.cancel()
            await asyncio.wait_for(one.cancelled.wait(), 5)
            await until(lambda: not rig.router._fleet.engines[0].sent)
            assert rig.router._fleet.engines[0].loads.in_flight == 0

    asyncio.run(run())


def test_a_deadline_ends_the_request_everywhere() -> None:
    async def run() -> None:
        async with cluster("one", "two") as (rig, engines):
            for engine in engines:
                engine.hold_after = 3
            reply = await rig.generate(prompt(), timeout=0.4)
            assert reply.code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert len(reply.ids()) == 3
            await until(lambda: any(engine.cancelled.is_set() for engine in engines))
            assert sum(len(engine.requests) for engine in engines) == 1

    asyncio.run(run())


def test_more_requests_than_it_may_have_are_refused_at_once() -> None:
    async def run() -> None:
        async with cluster("one", max_in_flight=2) as (rig, (one,)):
            one.hold_after = 0
            calls = [asyncio.create_task(rig.generate(prompt())) for _ in range(2)]
            await until(lambda: len(one.requests) == 2)
            reply = await rig.generate(prompt())
            assert reply.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "--max-in-flight" in reply.details
            assert int(dict(reply.trailing)["retry-after-ms"]) > 0
            one.released.set()
            assert {(await call).code for call in calls} == {grpc.StatusCode.OK}
            assert (await rig.generate(prompt())).code is grpc.StatusCode.OK

    asyncio.run(run())


def test_health_and_refusals_follow_the_engines() -> None:
    async def run() -> None:
        async with cluster("one") as (rig, (one,)):
            await _becomes(rig, SERVING)
            await one.kill()
            await _becomes(rig, NOT_SERVING)
            reply = await rig.generate(prompt())
            assert reply.code is grpc.StatusCode.UNAVAILABLE
            assert reply.details.startswith("no engine serves: one at 127.0.0.1:")
            await one.restart()
            await until(lambda: rig.router._fleet.is_serving)
            assert (await rig.generate(prompt())).code is grpc.StatusCode.OK

    asyncio.run(run())


def test_a_draining_engine_gets_no_new_requests() -> None:
    async def run() -> None:
        async with cluster("one", "two") as (rig, (one, _)):
            one.load.draining = True
            await until(lambda: any(engine.state == "draining" for engine in rig.router._fleet.engines))
            for _ in range(6):
                assert (await rig.generate(prompt())).engines() == ["two"]
            assert (await rig.status())["one"].state == "draining"

    asyncio.run(run())


def test_closing_refuses_new_requests_and_lets_running_ones_end() -> None:
    async def run() -> None:
        async with cluster("one") as (rig, (one,)):
            one.hold_after = 4
            call = asyncio.create_task(rig.generate(prompt(ignore_eos=True)))
            await one.held.wait()
            await rig.router.close()
            assert (await rig.generate(prompt())).details == "the router is shutting down"
            stopping = asyncio.create_task(rig.router.stop(10))
            one.released.set()
            reply = await call
            assert (reply.code, len(reply.ids())) == (grpc.StatusCode.OK, 24)
            await stopping

    asyncio.run(run())


def test_engines_that_leave_finish_what_they_have_and_those_that_come_serve() -> None:
    async def run() -> None:
        async with cluster("one") as (rig, (one,)), doubles("two") as (two,):
            one.hold_after = 4
            call = asyncio.create_task(rig.generate(prompt(ignore_eos=True)))
            await one.held.wait()
            rig.router._fleet.set_members({"two": two.address})
            await until(lambda: rig.router._fleet.is_serving)
            assert (await rig.generate(prompt())).engines() == ["two"]
            one.released.set()
            reply = await call
            assert (reply.code, len(reply.ids()), reply.engines()) == (grpc.StatusCode.OK, 24, ["one"])

    asyncio.run(run())


def test_models_are_kept_apart() -> None:
    async def run() -> None:
        async with (
            doubles("a1", "a2", model="a") as a,
            doubles("b1", model="b") as b,
            rig_for([*a, *b]) as rig,
        ):
            request = prompt()
            reply = await rig.generate(request)
            assert reply.details == "model: is required where several are served: a, b"
            request.model = "b"
            assert (await rig.generate(request)).engines() == ["b1"]
            request.model = "c"
            reply = await rig.generate(request)
            assert reply.code is grpc.StatusCode.NOT_FOUND
            assert "this cluster has a, b" in reply.details
            models = (await rig.generation.ListModels(pb.ListModelsRequest())).models
            assert [model.name for model in models] == ["a", "b"]
            await b[0].kill()
            request.model = "b"
            assert (await rig.generate(request)).code is grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


@pytest.mark.parametrize("policy", ["cache-aware", "least-loaded", "round-robin", "random"])
def test_every_policy_serves_and_only_one_follows_the_cache(policy: str) -> None:
    async def run() -> None:
        async with cluster("one", "two", "three", policy=policy) as (rig, engines):
            served = [(await rig.generate(prompt())).engines()]
            view, known = rig.router._view, rig.router._fleet.engines
            await until(lambda: any(view.predict(engine, PROMPT, "") == 40 for engine in known))
            served += [(await rig.generate(prompt())).engines() for _ in range(11)]
            where = {one for (one,) in served}
            if policy == "cache-aware":
                assert len(where) == 1
            if policy == "round-robin":
                assert served[:3] == served[3:6]
            if policy != "cache-aware":
                assert len(where) >= (2 if policy == "random" else 3)
            assert sum(len(engine.requests) for engine in engines) == 12

    asyncio.run(run())


def test_a_herd_of_new_prompts_spreads() -> None:
    async def run() -> None:
        async with cluster("one", "two", "three", "four") as (rig, engines):
            for engine in engines:
                engine.hold_after = 0
            calls = [asyncio.create_task(rig.generate(prompt([number, *PROMPT]))) for number in range(40)]
            await until(lambda: sum(len(engine.requests) for engine in engines) == 40)
            counts = [len(engine.requests) for engine in engines]
            assert 5 <= min(counts) <= max(counts) <= 15
            for engine in engines:
                engine.released.set()
            assert {(await call).code for call in calls} == {grpc.StatusCode.OK}

    asyncio.run(run())


def test_an_engine_that_lacks_pages_is_told_who_has_them() -> None:
    async def run() -> None:
        async with cluster("one", "two", policy="round-robin") as (rig, (one, two)):
            one.publish(one.change("l2", one.keys(PROMPT)[:3]))
            known = rig.router._fleet.engines
            await until(lambda: rig.router._view.predict(known[0], PROMPT, "") == 24)
            apart = prompt()
            apart.no_cache = True
            for request in (apart, apart, prompt(), prompt()):
                await rig.generate(request)
            assert not any(request.HasField("peer") for request in one.requests)
            (told,) = [request.peer for request in two.requests if request.HasField("peer")]
            assert told.address == one.address
            assert told.pages in (3, 5)  # before or after it had the whole prompt

    asyncio.run(run())


def test_the_commands_show_what_the_router_knows(capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        bad = Double("bad", root=b"x" * 16)
        await bad.start()
        async with cluster("one", "two") as (rig, (one, two)):
            addresses = {double.address: double.address for double in (one, two, bad)}
            rig.router._fleet.set_members(addresses)
            await until(lambda: any(engine.refused for engine in rig.router._fleet.engines))
            one.publish(one.change("l1", one.keys(PROMPT)[:3]), one.change("l2", one.keys(PROMPT)))
            await until(lambda: rig.router._view.predict(rig.router._fleet.engines[0], PROMPT, "") == 40)
            ids = ",".join(map(str, PROMPT))
            to = ("--address", rig.address)
            for argv in (
                ["cluster", "status"],
                ["cluster", "status", "--json"],
                ["route", "explain", "--token-ids", ids],
                ["route", "explain", bytes(PROMPT).decode(), "--json"],
                ["route", "explain", "x", "--salt", "s" * 300],
                ["route", "explain"],
            ):
                statuses.append(await asyncio.to_thread(main, [*argv, *to]))
        await bad.kill()

    statuses: list[int] = []
    asyncio.run(run())
    out, err = capsys.readouterr()
    assert statuses == [0, 0, 0, 0, 1, 2]
    assert err.splitlines()[-2:] == [
        "error: INVALID_ARGUMENT: prefix.cache_salt: must have at most 256 characters, has 300",
        "error: explain: give one of PROMPT (- for stdin), --token-ids and --messages",
    ]
    lines = out.splitlines()
    head = "engine address model state running waiting sent pages shards lag self-test"
    assert " ".join(lines[0].split()) == head
    assert "serving" in lines[1]
    assert "l1 5, l2 5" in lines[1]  # with those of the self-test
    assert lines[3].startswith("refused: ")
    assert "model root 7878" in lines[3]
    assert lines[4].startswith("cluster default, policy cache-aware, members from static, ")
    status = json.loads(lines[5])
    assert [engine["id"] for engine in status["engines"]] == ["one", "two"]
    assert status["engines"][0]["self_test"] == "passed"
    assert lines[6].split() == ["engine", "l1", "l2", "l3", "peer", "queue", "load", "prefill", "TTFT"]
    assert lines[7].split()[:5] == ["one", "24", "16", "0", "0"]
    assert lines[9].startswith("43 tokens go to one: ")
    explained = json.loads(lines[10])
    assert (explained["chosen"], explained["engines"][0]["matched"]["l2"]) == ("one", 16)
    assert explained["engines"][1]["ttft_s"] > explained["engines"][0]["ttft_s"] > 0
