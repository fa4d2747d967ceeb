"""Tiers so small that every step stores and loads, under many clients."""

from __future__ import annotations

import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jkv.cache.l3.housekeeping import DiskCost
from tests.e2e.server import wait_for
from tests.faults.rig import (
    OBJECT_BYTES,
    PAGE,
    WAIT_S,
    Answer,
    Tiered,
    in_parallel,
    prompts,
    sampled,
    stored,
    tiered,
)

NewPrompt = Callable[[int], list[int]]

L3_PAGES = 64
IN_FLIGHT = 8  # pages being written, and evicted ones yet to be deleted


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiered]:
    """8 pages of L1, 16 of L2 and 64 of L3."""
    directory = tmp_path_factory.mktemp("crowded")
    cost = DiskCost(directory)
    cap = cost.overhead(OBJECT_BYTES, models=1) + L3_PAGES * cost.page(OBJECT_BYTES)
    sizes = ("--l1-pages", "8", "--l2-gib", "0.1MiB", "--l3-gib", f"{(cap + 100) / 2**20:.5f}MiB")
    with tiered(directory, *sizes, "--max-model-len", "64") as subject:
        assert {tier.tier: tier.pages_capacity for tier in subject.stats().tiers} == {
            "l1": 8,
            "l2": 17,
            "l3": L3_PAGES,
        }
        yield subject


@pytest.mark.parametrize("pages", [300, pytest.param(2000, marks=pytest.mark.full)])
def test_the_directory_never_outgrows_its_size(crowded: Tiered, pages: int) -> None:
    """A cap of 64 pages and many times as many written, by several clients."""
    new_prompt, bound = prompts(8000 + pages), crowded.l3.bytes_capacity
    page_cost = DiskCost(crowded.store).page(OBJECT_BYTES)
    stores, sizes = crowded.l3.stores, list[int]()

    def measure() -> None:
        assert len(stored(crowded.store)) <= L3_PAGES + IN_FLIGHT
        sizes.append(disk_usage(crowded.store))
        assert sizes[-1] <= bound + IN_FLIGHT * page_cost

    with sampled(measure):
        while crowded.l3.stores < stores + pages:
            in_parallel(
                lambda prompt: crowded.ask(prompt, max_tokens=1), [new_prompt(7) for _ in range(16)], 4
            )
    crowded.drain()
    stats = crowded.l3
    assert stats.pages == L3_PAGES
    assert stats.bytes <= bound
    wait_for(lambda: len(stored(crowded.store)) <= L3_PAGES, "what was evicted is deleted", WAIT_S)
    assert disk_usage(crowded.store) <= bound
    assert len(sizes) > 5
    assert crowded.errors() == {}


@pytest.mark.parametrize("requests", [128, pytest.param(2000, marks=pytest.mark.full)])
def test_many_clients_get_their_serial_answers(crowded: Tiered, requests: int) -> None:
    """Conversations that grow and fork, each turn from a client of its own, under 64 clients at a time."""
    chance = random.Random(requests)
    every = conversations(prompts(9000 + requests), chance)
    expected = {tuple(prompt): crowded.cold(prompt, max_tokens=5) for prompt in every}
    before = crowded.stats()
    asked = [chance.choice(every) for _ in range(requests)]
    wrong: list[list[int]] = []
    served = {"l1": 0, "l2": 0, "l3": 0}
    lock = threading.Lock()

    def ask(prompt: list[int]) -> None:
        answer = crowded.ask(prompt, max_tokens=5)
        with lock:
            count(answer, served)
            if answer.bits != expected[tuple(prompt)].bits:
                wrong.append(prompt)

    in_parallel(ask, asked, 64)
    assert not wrong
    assert all(served.values()), served
    crowded.is_idle_and_empty()
    after = crowded.stats()
    for old, new in zip(before.tiers, after.tiers, strict=True):
        assert new.hits > old.hits
        assert new.evictions > old.evictions
        # Some may wait longer for room in L2 than a load may take.
        assert new.errors_by_reason.keys() - old.errors_by_reason.keys() <= {"read_late"}


def conversations(new_prompt: NewPrompt, chance: random.Random) -> list[list[int]]:
    """Prompts of 1 to 6 pages and a bit, many of which begin alike: more than L3 holds."""
    turns = []
    for _ in range(16):
        whole = new_prompt(6)
        other = new_prompt(6)
        fork = chance.randint(1, 4) * PAGE
        for conversation in (whole, [*whole[:fork], *other[fork:]]):
            turns += [conversation[: pages * PAGE + chance.randint(0, 3)] for pages in (2, 4, 6)]
    return turns


def count(answer: Answer, served: dict[str, int]) -> None:
    for tier in answer.tiers:
        served[tier] += 1


def disk_usage(path: Path) -> int:
    """What `du` says, which complains of files that go while it looks."""
    done = subprocess.run(["du", "-s", "-B1", path], capture_output=True, text=True, check=False)
    return int(done.stdout.split()[0])
