"""When things go wrong: failing steps, overload, deadlines, clients and servers that go away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from jkv.engine.request import EngineRequest, FinishReason
from jkv.engine.runner import Pending
from jkv.engine.scheduler import Chunk
from jkv.errors import InvalidRequestError, OverloadedError, ShuttingDownError
from tests.engine.conftest import Tiny
from tests.engine.harness import Bench, Outcome, build, random_prompt, request, tiny_checkpoint, wait_for


@pytest.fixture
def own() -> Iterator[Bench]:
    """An engine that the test may stop."""
    bench = build(tiny_checkpoint("llama3"), page_size=16, l1_tokens=4096)
    yield bench
    bench.stop()


class Fault(RuntimeError):
    pass


class BrokenPending(Pending):
    def read(self) -> Any:
        raise Fault("the device gave up while this step ran")


def fail_once(bench: Bench, monkeypatch: pytest.MonkeyPatch, *, step: int, reading: bool) -> None:
    """Makes the engine's `step`-th step from now fail, when it is dispatched or when it is read."""
    dispatch, count = bench.runner.dispatch, iter(range(1, 10**6))

    def faulty(chunks: Sequence[Chunk]) -> Pending:
        if next(count) != step:
            return dispatch(chunks)
        if not reading:
            raise Fault("the device gave up")
        pending = dispatch(chunks)
        return BrokenPending(**vars(pending))

    monkeypatch.setattr(bench.runner, "dispatch", faulty)


@pytest.mark.parametrize("reading", [False, True], ids=["dispatch", "read"])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_failed_step_ends_its_requests_and_the_engine_serves_on(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, step: int, reading: bool
) -> None:
    bench = tiny()
    r = request(random_prompt(1, 70), 12)
    expected = bench.one(r)
    assert bench.one(r).cached == 64
    fail_once(bench, monkeypatch, step=step, reading=reading)
    outcomes = bench.run(r, *[request(random_prompt(i, 70), 12) for i in range(2, 8)])
    assert {o.finish_reason for o in outcomes} == {FinishReason.ERROR}
    assert all("failed" in o.error for o in outcomes)
    again = bench.one(r)
    assert again.cached == 0, "a page of the lost pool was used"
    assert again.bits == expected.bits
    assert bench.one(r).cached == 64


def test_an_engine_that_cannot_recover_answers_everyone_and_says_so(
    own: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory() -> None:
        raise Fault("no memory for a new pool")

    monkeypatch.setattr(own.runner, "reset", no_memory)
    fail_once(own, monkeypatch, step=2, reading=False)
    outcomes = own.run(*[request(random_prompt(i, 70), 12) for i in range(7)])
    assert {o.finish_reason for o in outcomes} == {FinishReason.ERROR}
    asyncio.run(asyncio.wait_for(own.engine.ended(), 5))
    with pytest.raises(ShuttingDownError):
        own.one(request(random_prompt(1, 10), 1))


def test_a_full_queue_refuses_and_then_takes_requests_again(tiny: Tiny) -> None:
    bench = tiny(max_queue=2)
    requests = [request(random_prompt(i, 10), 100) for i in range(9)]

    async def all_at_once() -> list[Outcome | BaseException]:
        return await asyncio.gather(*(bench.collect(r) for r in requests), return_exceptions=True)

    results = asyncio.run(all_at_once())
    refused = [r for r in results if isinstance(r, OverloadedError)]
    served = [r for r in results if isinstance(r, Outcome)]
    assert (len(served), len(refused)) == (6, 3)
    assert all(0 < r.retry_after_s <= 60 for r in refused)
    assert "--max-queue 2" in str(refused[0])
    assert all(len(o.tokens) == 100 for o in served)
    assert len(bench.one(requests[-1]).tokens) == 100


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "limit"),
    [(1000, 25, "max-model-len is 1024"), (1024, 1, "max-model-len is 1024")],
)
def test_a_request_that_can_never_fit_is_refused(
    tiny: Tiny, prompt: int, max_tokens: int, limit: str
) -> None:
    bench = tiny()
    with pytest.raises(InvalidRequestError, match=limit):
        bench.one(request(random_prompt(0, prompt), max_tokens))
    assert len(bench.one(request(random_prompt(0, 1000), 24)).tokens) == 24


def test_a_deadline_ends_queued_and_running_requests(tiny: Tiny) -> None:
    bench = tiny()
    soon = time.monotonic() + 0.15
    running = [request(random_prompt(i, 10), 900, deadline=soon) for i in range(4)]
    queued = [request(random_prompt(i, 10), 5, deadline=soon) for i in range(3)]
    late = request(random_prompt(0, 10), 5, deadline=time.monotonic() - 1)
    outcomes = bench.run(*running, *queued, late)
    assert {o.finish_reason for o in outcomes} == {FinishReason.CANCELLED}
    assert {o.error for o in outcomes} == {"the deadline passed"}
    assert all(0 < len(o.tokens) < 900 for o in outcomes[:4])
    assert all(not o.tokens for o in outcomes[4:])


def test_a_client_that_goes_away_frees_its_pages_and_slot(tiny: Tiny) -> None:
    bench = tiny()

    async def leave_early() -> None:
        readers = [asyncio.create_task(bench.collect(request(random_prompt(i, 10), 900))) for i in range(8)]
        await asyncio.sleep(0.1)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    asyncio.run(leave_early())
    wait_for(lambda: bench.engine.stats.l1.in_use == 0, seconds=1)
    assert bench.loop.alive == 0


def test_a_closed_event_loop_harms_nobody(tiny: Tiny) -> None:
    bench = tiny()
    loop = asyncio.new_event_loop()

    async def leave_at_first_output() -> None:
        came = asyncio.Event()
        generating = bench.engine.generate(request(random_prompt(1, 10), 50), lambda _: bool(came.set()))
        left = asyncio.create_task(generating)
        await came.wait()
        assert not left.cancelled()

    loop.run_until_complete(leave_at_first_output())
    loop.close()
    wait_for(lambda: bench.loop.alive == 0)
    assert len(bench.one(request(random_prompt(2, 10), 5)).tokens) == 5


async def _drain_while(bench: Bench, r: EngineRequest, timeout: float) -> Outcome:
    running = asyncio.create_task(bench.collect(r))
    await asyncio.to_thread(wait_for, lambda: bench.engine.stats.running == 1)
    draining = asyncio.create_task(bench.engine.drain(timeout))
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDownError):
        await bench.collect(r)
    await draining
    return await running


def test_drain_lets_running_requests_finish(own: Bench) -> None:
    outcome = asyncio.run(_drain_while(own, request(random_prompt(1, 10), 200), 30))
    assert (outcome.finish_reason, len(outcome.tokens)) == (FinishReason.LENGTH, 200)


def test_drain_cancels_what_takes_too_long(own: Bench) -> None:
    outcome = asyncio.run(_drain_while(own, request(random_prompt(1, 10), 1000), 0.05))
    assert not own.loop.running
    assert outcome.finish_reason is FinishReason.CANCELLED
    assert "shut down" in outcome.error
    assert 0 < len(outcome.tokens) < 1000
    own.scheduler.check()
    assert own.scheduler.pool.counts().in_use == 0


def test_stop_cancels_running_and_queued_requests(own: Bench) -> None:
    async def stop_early() -> list[Outcome]:
        readers = [asyncio.create_task(own.collect(request(random_prompt(i, 10), 900))) for i in range(7)]
        await asyncio.to_thread(wait_for, lambda: own.engine.stats.running == 4)
        await asyncio.to_thread(own.stop)
        return await asyncio.gather(*readers)

    outcomes = asyncio.run(stop_early())
    assert {o.finish_reason for o in outcomes} == {FinishReason.CANCELLED}
    assert own.loop.alive == 0
