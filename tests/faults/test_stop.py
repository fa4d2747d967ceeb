"""SIGTERM writes out what only memory holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.faults.rig import PAGE, Answer, Tiered, prompts, stop, tiered

PAGES = 9  # of a prompt


@dataclass(frozen=True)
class Life:
    """How a server runs until it is stopped, and how many prompts it gets; L1 holds seven."""

    policy: str
    l2: str
    prompts: int


LIVES = (
    Life("write-through", "4MiB", 12),
    Life("write-back", "4MiB", 12),
    Life("write-back", "0.1MiB", 6),  # L1 holds all of them, and L2 not even two
)


def test_all_pages_are_there_after_a_restart(tmp_path: Path) -> None:
    """One server after the other on one directory: each finds what the one before had, wherever that was."""
    new_prompt = prompts(6000)
    asked: list[list[int]] = []
    expected: list[Answer] = []
    for life in LIVES:
        with tiered(tmp_path, "--write-policy", life.policy, "--l2-gib", life.l2) as subject:
            survived(subject, asked, expected)
            asked = [new_prompt(PAGES) for _ in range(life.prompts)]
            expected = [subject.ask(prompt) for prompt in asked]
            pin_and_look(subject, life, asked)
            subject.faults.set(write_slow=1.0, slow_s=0.02)
            stop(subject)
    with tiered(tmp_path, "--drain-timeout", "1", "--load-timeout", "1") as subject:
        survived(subject, asked, expected)
        assert subject.l3.pages == sum(life.prompts for life in LIVES) * PAGES
        ends_though_the_disk_hangs(subject, asked[0], new_prompt(PAGES))


def pin_and_look(subject: Tiered, life: Life, asked: list[list[int]]) -> None:
    """Pins some pages of the first and the last prompt, and makes sure of where they are."""
    first, last = asked[0], asked[-1]
    assert subject.lookup(last) == {"l1": PAGES * PAGE}
    assert subject.lookup(first) == {"l2" if life.prompts > 7 else "l1": PAGES * PAGE}
    for prompt in (first, last):
        assert subject.pin(prompt[: 4 * PAGE]) == 4
    if life.policy == "write-back":
        assert subject.l3.stores == 0


def survived(subject: Tiered, asked: list[list[int]], expected: list[Answer]) -> None:
    """L3 has all of every prompt, with the right content."""
    for prompt, before in zip(asked, expected, strict=True):
        answer = subject.ask(prompt)
        assert (answer.bits, answer.tiers) == (before.bits, {"l3": PAGES * PAGE})
    assert subject.errors() == {}
    subject.flush("l1", "l2")


def ends_though_the_disk_hangs(subject: Tiered, old: list[int], new: list[int]) -> None:
    """Reads and writes under way that will not come back keep neither requests nor the process."""
    subject.faults.set(read_slow=1.0, write_slow=1.0, slow_s=3600)
    for prompt in (old, new):
        answer = subject.ask(prompt)
        assert (answer.bits, answer.tiers) == (subject.cold(prompt).bits, {})
    assert subject.stats().pending_writes
    stop(subject)
