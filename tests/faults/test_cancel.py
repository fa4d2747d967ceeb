"""Clients that go away while pages are looked up, loaded and written."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from tests.faults.rig import Tiered, in_parallel, prompts, request

NewPrompt = Callable[[int], list[int]]

CLIENTS = 8
PAGES = 12

STAGES = {
    # What the store does meanwhile, for how long, at most, a client stays, and what L3 counts then.
    "lookup": ({}, 0.004, "hits"),
    "load": ({"read_slow": 1.0, "slow_s": 0.01}, 0.06, "loads"),
    "write": ({"write_slow": 1.0, "slow_s": 0.01}, 0.1, "stores"),
}


@pytest.mark.parametrize("cancels", [24, pytest.param(500, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_left_behind(subject: Tiered, stage: str, cancels: int) -> None:
    plan, patience, counted = STAGES[stage]
    chance, new_prompt = random.Random(cancels), prompts(7000 + cancels + list(STAGES).index(stage))
    cached = [new_prompt(PAGES) for _ in range(4)]
    expected = [subject.store_prompt(prompt) for prompt in cached]
    stays = [(number, chance.uniform(0, patience)) for number in range(cancels)]

    def ask_and_leave(stay: tuple[int, float]) -> None:
        number, seconds = stay
        prompt = new_prompt(PAGES) if stage == "write" else cached[number % len(cached)]
        call = subject.server.stub.Generate(request(prompt, 100))
        if number % 4 == 0:
            next(call)  # one in four stays so long in any case
        time.sleep(seconds)  # where in its stage the cancellation comes
        call.cancel()
        if stage == "load" and number % 2:
            subject.flush("l1", "l2")

    before = getattr(subject.l3, counted)
    with subject.counting(), subject.faults.of(**plan):
        in_parallel(ask_and_leave, stays, CLIENTS)
        subject.is_idle_and_empty()
    assert getattr(subject.l3, counted) > before
    for prompt, answer in zip(cached, expected, strict=True):
        subject.serves_from_disk(prompt, answer)
