"""SIGTERM writes out what only memory holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.rig import PAGE, Tiered, prompts, stop, tiered, whole_pages

L1 = 64  # pages


def survives(subject: Tiered, asked: list[list[int]], expected: Sequence[object]) -> None:
    for prompt, bits in zip(asked, expected, strict=True):
        answer = subject.ask(prompt)
        assert (answer.bits, answer.tiers) == (bits, {"l3": whole_pages(prompt)})
    assert subject.errors() == {}


@pytest.mark.parametrize("policy", ["write-through", "write-back"])
def test_all_pages_are_there_after_a_restart(tmp_path: Path, policy: str) -> None:
    """L1 holds a part of the prompts' pages, L2 another, some of both are pinned, and the disk is slow."""
    new_prompt = prompts(6000)
    asked = [new_prompt(9) for _ in range(12)]
    flags = ("--write-policy", policy, "--l2-gib", "4MiB")
    with tiered(tmp_path, *flags) as subject:
        expected = [subject.ask(prompt).bits for prompt in asked]
        assert subject.pin(asked[0]) == 9
        assert subject.pin(asked[-1]) == 9
        if policy == "write-back":
            assert subject.l3.pages == 0
            assert subject.lookup(asked[0]) == {"l2": 9 * PAGE}
        assert subject.lookup(asked[-1]) == {"l1": 9 * PAGE}
        subject.faults.set(write_slow=1.0, slow_s=0.02)
        stop(subject)
    with tiered(tmp_path, *flags) as subject:
        assert subject.l3.pages == len(asked) * 9
        survives(subject, asked, expected)


def test_a_small_l2_lets_all_of_l1_through_at_a_stop(tmp_path: Path) -> None:
    new_prompt = prompts(6001)
    asked = [new_prompt(9) for _ in range(6)]
    flags = ("--write-policy", "write-back", "--l2-gib", "0.1MiB")
    with tiered(tmp_path, *flags) as subject:
        assert subject.tier("l2").pages_capacity < 6 * 9 // 2
        expected = [subject.ask(prompt).bits for prompt in asked]
        assert subject.l3.pages == 0
        stop(subject)
    with tiered(tmp_path, *flags) as subject:
        survives(subject, asked, expected)
