"""kill -9 while pages are being written, again and again on one directory."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.e2e.server import wait_for
from tests.faults.rig import (
    OBJECT_BYTES,
    PAGE,
    WAIT_S,
    Answer,
    Tiered,
    in_parallel,
    prompts,
    published,
    stored,
    tiered,
)

CLIENTS = 4
PAGES = 30  # of a prompt


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.full)])
def test_what_was_published_is_served_and_nothing_else(tmp_path: Path, kills: int) -> None:
    chance, new_prompt = random.Random(kills), prompts(5000 + kills)
    store = tmp_path / "l3"
    asked: list[list[int]] = []
    in_mid_write = 0
    for _ in range(kills):
        with tiered(tmp_path, store=store) as subject:
            survived(subject, asked)
            asked = [new_prompt(PAGES) for _ in range(4 * CLIENTS)]
            ask_until_killed(subject, asked, enough=chance.randint(1, 10 * PAGES))
        in_mid_write += any(0 < len(published(store, prompt)) < PAGES for prompt in asked)
        leave_stale_locks(store)
    with tiered(tmp_path, store=store) as subject:
        survived(subject, asked)
        owners = [path for path in store.iterdir() if path.is_dir()]
        assert len(owners) == 1, "each start took the same owner over"
        read_by_another(subject, asked, tmp_path / "another")
    assert in_mid_write, "no kill came between two pages of a prompt"


def ask_until_killed(subject: Tiered, asked: Sequence[list[int]], enough: int) -> None:
    """Kills the server once it has published so many more pages, while clients ask."""
    before, killed = stored(subject.store).keys(), threading.Event()

    def ask(prompts: Sequence[list[int]]) -> None:
        try:
            for prompt in prompts:
                subject.ask(prompt)
        except grpc.RpcError:
            if not killed.is_set():
                raise

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(ask, asked[number::CLIENTS]) for number in range(CLIENTS)]
        wait_for(lambda: len(stored(subject.store).keys() - before) >= enough, "pages are published", WAIT_S)
        killed.set()
        subject.server.kill()
    for client in clients:
        client.result()


def leave_stale_locks(store: Path) -> None:
    """What writes of other versions of TensorStore may have left."""
    for page in list(stored(store).values())[::10]:
        (store / f"{page.name}.__lock").write_bytes(b"\xff" * 3 * OBJECT_BYTES)


def survived(subject: Tiered, asked: Sequence[list[int]]) -> None:
    """Every page that was published before is found and served, with what it should hold."""
    assert not list(subject.store.rglob("*__lock"))
    wait_for(lambda: subject.l3.pages == len(stored(subject.store)), "all pages are known", WAIT_S)
    sizes = {(subject.store / page.name).stat().st_size for page in stored(subject.store).values()}
    assert sizes <= {OBJECT_BYTES}
    expected: dict[int, Answer] = {}

    def compare(number: int) -> None:
        prompt = asked[number]
        pages = len(published(subject.store, prompt))
        assert subject.lookup(prompt) == ({"l3": pages * PAGE} if pages else {})
        answer = subject.ask(prompt)
        assert answer.tiers == ({"l3": pages * PAGE} if pages else {})
        expected[number] = answer

    # One after the other: each needs half of L1, and what it finds must be on the disk alone.
    for number in range(len(asked)):
        compare(number)
    in_parallel(lambda n: same(subject.cold(asked[n]), expected[n]), range(len(asked)), CLIENTS)
    assert subject.errors() == {}
    subject.is_idle_and_empty()


def read_by_another(subject: Tiered, asked: Sequence[list[int]], directory: Path) -> None:
    """A second server on the store serves the first one's pages, which it does not own, before and after the
    first is killed.
    """
    directory.mkdir()
    with tiered(directory, store=subject.store) as other:
        for prompt in asked:
            if prompt is asked[len(asked) // 2]:
                subject.server.kill()
            answer = other.ask(prompt)
            assert answer.tiers == {"l3": PAGES * PAGE}
            same(answer, other.cold(prompt))
        assert other.l3.pages == 0
        assert other.errors() == {}


def same(one: Answer, other: Answer) -> None:
    assert one.bits == other.bits
