from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import pytest

from jkv.cache.l3.reasons import Reason
from jkv.cache.l3.writers import Turn, Writers

WAIT_S = 30.0
SHORT_S = 0.05
KEY, OTHER = b"\0", b"\1"  # of different threads

Outcomes = queue.SimpleQueue[object]


def tell(outcomes: Outcomes, outcome: object) -> Callable[[Turn], None]:
    """A job that ends at once, and tells so if it may."""

    def job(turn: Turn) -> None:
        if turn.finish():
            outcomes.put(outcome)

    return job


class Hang:
    """A job that has reached the store and gets no answer until it is let go."""

    def __init__(self, told: Outcomes) -> None:
        self.started, self.answer = threading.Event(), threading.Event()
        self.first: bool | None = None
        self._told = told

    def __call__(self, turn: Turn) -> None:
        self.started.set()
        assert self.answer.wait(WAIT_S)
        self.first = turn.finish()
        self._told.put("answered")


def test_jobs_of_a_key_keep_their_order_and_closing_waits_for_them() -> None:
    writers, told = Writers("test", 2, WAIT_S), Outcomes()
    for number in range(50):
        assert writers.submit(KEY, tell(told, number), told.put) is None
    assert writers.close()
    assert [told.get_nowait() for _ in range(50)] == list(range(50))
    assert told.empty()


def test_a_store_that_hangs_is_waited_for_by_nobody() -> None:
    writers, refused, told = Writers("test", 2, SHORT_S), Outcomes(), Outcomes()
    hang = Hang(told)
    assert writers.submit(KEY, hang, refused.put) is None
    assert hang.started.wait(WAIT_S)
    assert writers.submit(KEY, tell(told, "behind it"), refused.put) is None
    for _ in range(2):
        assert refused.get(timeout=WAIT_S) is Reason.TIMEOUT
    assert writers.submit(KEY, tell(told, "later"), refused.put) is Reason.TIMEOUT
    assert writers.submit(OTHER, tell(told, "elsewhere"), refused.put) is None
    assert told.get(timeout=WAIT_S) == "elsewhere"

    hang.answer.set()
    assert told.get(timeout=WAIT_S) == "answered"
    assert hang.first is False, "its outcome is told twice"
    while writers.submit(KEY, tell(told, "again"), refused.put) is Reason.TIMEOUT:
        time.sleep(0.001)
    assert told.get(timeout=WAIT_S) == "again"
    writers.close()
    assert refused.empty()
    assert told.empty(), "a job ran that was refused before its turn"


def test_closing_does_not_wait_for_a_store_that_hangs() -> None:
    writers, refused, told = Writers("test", 1, SHORT_S), Outcomes(), Outcomes()
    hang = Hang(told)
    writers.submit(KEY, hang, refused.put)
    assert hang.started.wait(WAIT_S)
    assert not writers.close()
    assert refused.get_nowait() is Reason.TIMEOUT
    hang.answer.set()


def test_a_job_that_waits_for_others_is_not_late() -> None:
    writers, refused, told = Writers("test", 1, SHORT_S), Outcomes(), Outcomes()

    def job(turn: Turn) -> None:
        with turn.waiting():
            time.sleep(6 * SHORT_S)
        told.put(turn.finish())

    writers.submit(KEY, job, refused.put)
    assert told.get(timeout=WAIT_S) is True
    writers.close()
    assert refused.empty()


def test_a_job_that_raises_has_an_outcome_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    writers, refused, told = Writers("test", 1, WAIT_S), Outcomes(), Outcomes()

    def job(turn: Turn) -> None:
        raise RuntimeError("not foreseen")

    with caplog.at_level(logging.CRITICAL):
        writers.submit(KEY, job, refused.put)
        writers.submit(KEY, tell(told, "next"), refused.put)
        writers.close()
    assert refused.get_nowait() is Reason.IO
    assert told.get_nowait() == "next"
