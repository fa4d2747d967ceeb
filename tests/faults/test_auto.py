"""`--load-policy auto` over a disk that hangs or is slow: requests wait little longer than they compute."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import pytest

from jkv.client import main
from tests.e2e.server import wait_for
from tests.faults.rig import PAGE, WAIT_S, Answer, Tiered, prompts, tiered

# What the server forgives a load that is late, and what a busy machine may add; its --load-timeout is 30 s.
PATIENCE_S, NOISE_S = 0.25, 2.0
REQUESTS = 12


@dataclass(frozen=True)
class Timed:
    answer: Answer
    seconds: float


class Auto:
    """A server whose prompts take it some twenty milliseconds: far longer than a healthy disk, and less than
    one that takes 50 ms a page. All answers are compared with those that no cache had a part in.
    """

    def __init__(self, subject: Tiered) -> None:
        new_prompt = prompts(4000)
        self.subject = subject
        self.asked = [new_prompt(29) for _ in range(4)]
        self._expected = [subject.store_prompt(prompt).bits for prompt in self.asked]

    def from_disk(self, number: int) -> Timed:
        """Asks for one of the prompts while only the disk has it."""
        number %= len(self.asked)
        self.subject.leave_to_disk()
        result = timed(self.subject.ask, self.asked[number])
        assert result.answer.bits == self._expected[number]
        return result

    def cold(self, number: int) -> float:
        number %= len(self.asked)
        result = timed(self.subject.cold, self.asked[number])
        assert result.answer.bits == self._expected[number]
        return result.seconds


def timed(ask: Callable[[Sequence[int]], Answer], prompt: Sequence[int]) -> Timed:
    started = time.monotonic()
    answer = ask(prompt)
    return Timed(answer, time.monotonic() - started)


@pytest.fixture(scope="module")
def auto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Auto]:
    flags = "--load-policy auto --load-timeout 30 --max-batched-tokens 8 --max-mixed-tokens 8"
    with tiered(tmp_path_factory.mktemp("auto"), *flags.split()) as subject:
        yield Auto(subject)


def failing_tiers(auto: Auto, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["health", "--address", auto.subject.server.address]) == 0
    return capsys.readouterr().err


def test_a_disk_that_hangs_is_left_alone_until_it_answers(
    auto: Auto, capsys: pytest.CaptureFixture[str]
) -> None:
    subject = auto.subject
    with subject.faults.of(read_slow=1.0, slow_s=3600):
        for number in range(REQUESTS):
            result = auto.from_disk(number)
            assert result.answer.tiers == {}
            assert result.seconds < 3 * auto.cold(number) + PATIENCE_S + NOISE_S
        stats = subject.stats()
        assert 3 <= stats.late_loads < REQUESTS, "after three the disk is asked now and then"
        assert subject.l3.breaker == "open"
        assert re.fullmatch(r"l3 is not used for now: read_late \d+\n", failing_tiers(auto, capsys))

    def closed() -> bool:
        auto.from_disk(0)
        return subject.l3.breaker == "closed"

    wait_for(closed, "the disk is used again", WAIT_S)
    assert failing_tiers(auto, capsys) == ""
    assert subject.errors().keys() == {"read_late"}


def test_a_disk_slower_than_computing_is_not_asked(auto: Auto) -> None:
    subject = auto.subject
    before = subject.stats()
    with subject.faults.of(read_slow=1.0):  # 50 ms
        results = [auto.from_disk(number) for number in range(REQUESTS)]
        cold = [auto.cold(number) for number in range(REQUESTS)]
    assert median(result.seconds for result in results) < 2 * median(cold) + 0.02
    assert sum(result.seconds for result in results) < 2 * sum(cold) + 2 * PATIENCE_S + NOISE_S
    after = subject.stats()
    assert after.gated_loads - before.gated_loads >= REQUESTS // 2
    assert after.late_loads - before.late_loads <= 3


@pytest.mark.full
def test_a_disk_that_is_fast_again_is_found_so(auto: Auto) -> None:
    """It is tried now and then; nobody has to tell."""

    def served(number: int) -> bool:
        time.sleep(0.5)
        return auto.from_disk(number).answer.tiers == {"l3": 29 * PAGE}

    for number in range(2):  # a busy machine makes a single load late now and then
        wait_for(partial(served, number), "the disk is used again", WAIT_S)
