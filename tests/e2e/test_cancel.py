"""Clients that go away, and requests that may not wait."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from jkv.api import jkv_pb2 as pb
from tests.e2e.calls import collect, greedy, ids, refusal
from tests.e2e.server import Server

Golden = dict[str, dict[str, Any]]
SLOTS = 4  # of the server
_salts = (f"cancel {number}" for number in itertools.count())


def endless(**fields: Any) -> pb.GenerateRequest:
    sampling = greedy(4000, ignore_eos=True)
    return pb.GenerateRequest(prompt="Once upon a time", sampling=sampling, cache_salt=next(_salts), **fields)


@contextmanager
def all_slots_taken(server: Server) -> Iterator[list[Any]]:
    """As many endless streams as there are slots, all of them decoding."""
    calls = [server.stub.Generate(endless()) for _ in range(SLOTS)]
    try:
        for call in calls:
            next(call)
        yield calls
    finally:
        for call in calls:
            call.cancel()


def answers(server: Server) -> None:
    """A request gets through soon, once the news of what was cancelled has arrived."""
    request = pb.GenerateRequest(prompt="Hello", sampling=greedy(2, ignore_eos=True))
    deadline = time.monotonic() + 20
    while True:
        try:
            answer = collect(server.stub.Generate(request, timeout=20))
        except grpc.RpcError as error:
            failure: Any = error
            assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert time.monotonic() < deadline, "the queue stays full"
            time.sleep(0.05)
        else:
            assert len(answer.choices[0].token_ids) == 2
            return


def test_cancelled_while_decoding(smollm2: Server) -> None:
    with all_slots_taken(smollm2) as calls:
        calls[0].cancel()
        answers(smollm2)  # in the slot that is free now
        before = smollm2.idle_lines()
    in_use, cached, free, total = smollm2.wait_idle(before)
    assert in_use == 0
    assert cached + free == total


def test_cancelled_while_queued(smollm2: Server) -> None:
    with all_slots_taken(smollm2) as calls:
        queued = [smollm2.stub.Generate(endless()) for _ in range(2)]
        overloaded(smollm2)
        queued[0].cancel()
        queued[1].cancel()
        calls[0].cancel()
        answers(smollm2)  # before it stood two endless requests
        before = smollm2.idle_lines()
    assert smollm2.wait_idle(before)[0] == 0


def test_cancelled_while_prefilling(smollm2: Server, golden: Golden) -> None:
    cached_before = smollm2.idle_lines()[-1][1]
    prompt = golden["long-doc-6k"]["prompt_ids"]
    request = pb.GenerateRequest(token_ids=ids(prompt), sampling=greedy(8), cache_salt=next(_salts))
    call = smollm2.stub.Generate(request)
    time.sleep(1.0)
    before = smollm2.idle_lines()
    call.cancel()
    in_use, cached, _, _ = smollm2.wait_idle(before)
    assert in_use == 0
    assert 0 < cached - cached_before < len(prompt) // 64 // 2, "it began, and did not go far"
    answers(smollm2)


def overloaded(server: Server) -> Any:
    """The refusal of a request that finds the queue full."""

    def attempt() -> Any:
        return refusal(server.stub.Generate(endless(), timeout=0.5))

    deadline = time.monotonic() + 10
    while (error := attempt()).code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
        assert time.monotonic() < deadline, "the queue never filled up"
    return error


def test_a_full_queue_refuses_and_says_when_to_retry(smollm2: Server) -> None:
    with all_slots_taken(smollm2):
        queued = [smollm2.stub.Generate(endless()) for _ in range(2)]
        error = overloaded(smollm2)
        for call in queued:
            call.cancel()
    assert "--max-queue 2" in error.details()
    metadata = dict(error.trailing_metadata())
    assert 50 <= int(metadata["retry-after-ms"]) <= 60_000
    assert metadata["grpc-retry-pushback-ms"] == metadata["retry-after-ms"]
    answers(smollm2)


def test_sequences_that_do_not_all_fit_are_refused_and_leave_none_behind(smollm2: Server) -> None:
    with all_slots_taken(smollm2) as calls:
        request = endless()
        request.sampling.n = 3  # the queue has room for two
        error = refusal(smollm2.stub.Generate(request, timeout=10))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        calls[0].cancel()
        answers(smollm2)
        before = smollm2.idle_lines()
    assert smollm2.wait_idle(before)[0] == 0


def test_a_deadline_ends_a_request_that_decodes(smollm2: Server) -> None:
    started = time.monotonic()
    call = smollm2.stub.Generate(endless(), timeout=1.0)
    next(call)
    before = smollm2.idle_lines()
    expires(call, started)
    assert smollm2.wait_idle(before)[0] == 0


def test_a_deadline_ends_a_request_that_waits(smollm2: Server) -> None:
    with all_slots_taken(smollm2) as calls:
        started = time.monotonic()
        expires(smollm2.stub.Generate(endless(), timeout=1.0), started)
        calls[0].cancel()
        answers(smollm2)  # its place in the queue is free
        before = smollm2.idle_lines()
    assert smollm2.wait_idle(before)[0] == 0


def expires(call: Any, started: float) -> None:
    error = refusal(call)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0.9 < time.monotonic() - started < 3
