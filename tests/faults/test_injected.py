"""A page store whose operations fail, are cut short or take their time, under a running server."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.e2e.server import wait_for
from tests.faults.rig import PAGE, WAIT_S, Answer, Tiered, in_parallel, stored

NewPrompt = Callable[[int], list[int]]


def right(answer: Answer, expected: Answer, **tiers: int) -> None:
    assert (answer.bits, answer.tiers) == (expected.bits, tiers)


def test_reads_that_fail(subject: Tiered, new_prompt: NewPrompt) -> None:
    prompt = new_prompt(5)
    expected = subject.store_prompt(prompt)
    with subject.counting("read_io"), subject.faults.of(read_fail=1.0):
        right(subject.ask(prompt), expected)
        assert subject.l3.breaker == "open", "five reads in a row have failed"
        subject.leave_to_disk()
        right(subject.ask(prompt), expected)  # not even tried, or one page to see
    subject.serves_from_disk(prompt, expected)


def test_reads_that_are_short(subject: Tiered, new_prompt: NewPrompt) -> None:
    prompt = new_prompt(5)
    expected = subject.store_prompt(prompt)
    with subject.counting("read_size"), subject.faults.of(read_short=1.0):
        right(subject.ask(prompt), expected)
    subject.serves_from_disk(prompt, expected)


def test_reads_that_are_slow_but_in_time(subject: Tiered, new_prompt: NewPrompt) -> None:
    prompt = new_prompt(12)
    expected = subject.store_prompt(prompt)
    with subject.counting(), subject.faults.of(read_slow=1.0):
        right(subject.ask(prompt), expected, l3=12 * PAGE)


def test_reads_that_hang(subject: Tiered, new_prompt: NewPrompt) -> None:
    """No read keeps a request, or its pages."""
    prompt, other = new_prompt(8), new_prompt(5)
    expected = subject.store_prompt(prompt)
    late = subject.stats().late_loads
    with subject.counting("read_late"), subject.faults.of(read_slow=1.0, slow_s=3600):
        right(subject.ask(prompt), expected)
        right(subject.ask(other), subject.cold(other))
        subject.is_idle_and_empty()
    assert subject.stats().late_loads == late + 1
    subject.serves_from_disk(prompt, expected)


@pytest.mark.parametrize(("fault", "reason"), [("write_fail", "write_io"), ("write_full", "write_no_space")])
def test_writes_that_fail_do_not_stop_reads(
    subject: Tiered, new_prompt: NewPrompt, fault: str, reason: str
) -> None:
    old, new = new_prompt(5), new_prompt(5)
    expected_old, expected_new = subject.store_prompt(old), subject.cold(new)
    drops = subject.l3.drops
    with subject.counting(reason), subject.faults.of(**{fault: 1.0}):
        right(subject.ask(new), expected_new)
        subject.drain()
        assert subject.l3.breaker == "open"
        assert subject.l3.drops == drops + 5
        assert subject.pages(new) == []
        subject.leave_to_disk()
        right(subject.ask(old), expected_old, l3=5 * PAGE)
        right(subject.ask(new), expected_new)
    subject.serves_from_disk(new, expected_new)
    subject.serves_from_disk(old, expected_old)


def test_writes_that_are_short_without_a_word(subject: Tiered, new_prompt: NewPrompt) -> None:
    prompt = new_prompt(5)
    with subject.faults.of(write_short=1.0):
        expected = subject.ask(prompt)
        subject.leave_to_disk()
        assert subject.lookup(prompt) == {"l3": 5 * PAGE}, "nobody knows yet"
    with subject.counting("read_size"):
        right(subject.ask(prompt), expected)
    subject.serves_from_disk(prompt, expected)


def test_writes_that_are_slow_hold_nobody_up(subject: Tiered, new_prompt: NewPrompt) -> None:
    prompts = [new_prompt(5) for _ in range(4)]
    with subject.counting(), subject.faults.of(write_slow=1.0):
        answers = [subject.ask(prompt) for prompt in prompts]
        assert subject.stats().pending_writes
        again = [subject.ask(prompt) for prompt in prompts]
        subject.leave_to_disk()
    for prompt, first, second in zip(prompts, answers, again, strict=True):
        right(first, subject.cold(prompt))
        right(second, first, l1=5 * PAGE)
        subject.serves_from_disk(prompt, first)


def test_writes_that_hang(subject: Tiered, new_prompt: NewPrompt) -> None:
    """Requests go on, the tier is left out, and nothing waits for the writes for ever: neither Drain nor the
    pages. When the disk answers again, it is used again, and has kept nothing of what came too late.
    """
    old, new, last = new_prompt(5), new_prompt(8), new_prompt(3)
    expected_old, expected_new = subject.store_prompt(old), subject.cold(new)
    files = len(stored(subject.store))
    with subject.counting("write_timeout"), subject.faults.of(write_hang=1.0):
        right(subject.ask(new), expected_new)
        assert subject.stats().pending_writes
        right(subject.ask(old), expected_old, l3=5 * PAGE)
        right(subject.ask(new), expected_new, l1=8 * PAGE)
        subject.drain()
        assert subject.l3.breaker == "open"
        assert subject.lookup(new) == {"l1": 8 * PAGE}
        subject.is_idle_and_empty()
        right(subject.ask(last), subject.cold(last))
        subject.drain()
    wait_for(lambda: len(stored(subject.store)) == files, "what came late is deleted", WAIT_S)
    subject.serves_from_disk(new, expected_new)
    subject.serves_from_disk(old, expected_old)


def test_pages_that_cannot_be_deleted(subject: Tiered, new_prompt: NewPrompt) -> None:
    prompt = new_prompt(5)
    expected = subject.store_prompt(prompt)
    with subject.faults.of(delete_fail=1.0):
        assert subject.evict(prompt) == 5
        assert subject.lookup(prompt) == {}
        assert len(subject.pages(prompt)) == 5
        right(subject.ask(prompt), expected)
    subject.serves_from_disk(prompt, expected)


@pytest.mark.parametrize("rounds", [5, pytest.param(300, marks=pytest.mark.full)])
def test_everything_at_once(subject: Tiered, new_prompt: NewPrompt, rounds: int) -> None:
    """A tenth of all operations goes wrong in each way, while several clients ask."""
    prompts = [new_prompt(3 + number % 6) for number in range(12)]
    expected = [subject.cold(prompt) for prompt in prompts]
    ways = ("read_fail", "read_short", "read_slow", "write_fail", "write_full", "write_short", "write_slow")
    plan = dict.fromkeys((*ways, "delete_fail"), 0.1)
    before = subject.l3.hits

    def ask(pair: tuple[Sequence[int], Answer]) -> None:
        assert subject.ask(pair[0]).bits == pair[1].bits

    with subject.faults.of(seed=rounds, slow_s=0.02, **plan):
        for _ in range(rounds):
            in_parallel(ask, zip(prompts, expected, strict=True), 8)
            subject.leave_to_disk()
    assert subject.l3.hits > before
    assert {"read_io", "read_size"} & subject.errors().keys()
    subject.is_in_service_again(new_prompt)
    for prompt, answer in zip(prompts, expected, strict=True):
        subject.serves_from_disk(prompt, answer)
