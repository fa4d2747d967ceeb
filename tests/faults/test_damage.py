"""What happens to page files behind a running server's back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jkv.cache.keys import page_keys
from jkv.cache.l3.format import HEADER_BYTES
from tests.e2e.server import wait_for
from tests.faults.rig import OBJECT_BYTES, PAGE, PAGE_BYTES, WAIT_S, Tiered, flip, set_version, stored

NewPrompt = Callable[[int], list[int]]

# A page's bytes are [KV head, layer, token, K then V].
V = HEADER_BYTES + PAGE_BYTES // 3 // 2 // PAGE // 2

BAD = {
    "header": (lambda file: flip(file, 70), "read_corrupt"),
    "K": (lambda file: flip(file, HEADER_BYTES), "read_corrupt"),
    "V": (lambda file: flip(file, V), "read_corrupt"),
    "tail": (lambda file: flip(file, -1), "read_corrupt"),
    "version": (lambda file: set_version(file, 2), "read_version"),
    "empty": (lambda file: os.truncate(file, 0), "read_size"),
    "one byte short": (lambda file: os.truncate(file, OBJECT_BYTES - 1), "read_size"),
}


@pytest.mark.parametrize("damage", BAD)
def test_a_bad_page_is_computed_and_written_again(
    subject: Tiered, new_prompt: NewPrompt, damage: str
) -> None:
    harm, reason = BAD[damage]
    prompt = new_prompt(5)
    expected = subject.store_prompt(prompt)
    assert expected.bits == subject.cold(prompt).bits
    harm(subject.pages(prompt)[2])
    quarantined = subject.l3.quarantined
    with subject.counting(reason):
        answer = subject.ask(prompt)
    assert (answer.bits, answer.tiers) == (expected.bits, {"l3": 2 * PAGE})
    assert subject.l3.quarantined == quarantined + 1
    subject.drain()
    assert subject.pages(prompt)[2].stat().st_size == OBJECT_BYTES
    subject.serves_from_disk(prompt, expected)


def test_two_files_swapped(subject: Tiered, new_prompt: NewPrompt) -> None:
    one, other = new_prompt(5), new_prompt(5)
    expected = {id(prompt): subject.store_prompt(prompt) for prompt in (one, other)}
    first, second = subject.pages(one)[2], subject.pages(other)[3]
    aside = first.with_suffix(".aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    with subject.counting("read_mismatch"):
        for prompt, pages in ((one, 2), (other, 3)):
            answer = subject.ask(prompt)
            assert (answer.bits, answer.tiers) == (expected[id(prompt)].bits, {"l3": pages * PAGE})
    for prompt in (one, other):
        subject.serves_from_disk(prompt, expected[id(prompt)])


def test_a_file_deleted_after_it_was_looked_up(subject: Tiered, new_prompt: NewPrompt) -> None:
    prompt = new_prompt(6)
    expected = subject.store_prompt(prompt)
    subject.pages(prompt)[4].unlink()
    with subject.counting("read_missing"):
        answer = subject.ask(prompt)
    assert (answer.bits, answer.tiers) == (expected.bits, {"l3": 4 * PAGE})
    subject.serves_from_disk(prompt, expected)


def test_a_file_deleted_while_it_waits_to_be_read(subject: Tiered, new_prompt: NewPrompt) -> None:
    prompt = new_prompt(6)
    expected = subject.store_prompt(prompt)
    last = subject.pages(prompt)[5]
    with (
        subject.counting("read_missing"),
        subject.faults.of(read_slow=1.0, slow_s=1.0),
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(subject.ask, prompt)
        wait_for(lambda: subject.tier("l2").pages == 6, "all reads are queued", WAIT_S)
        last.unlink()
        answer = asked.result()
    assert (answer.bits, answer.tiers) == (expected.bits, {"l3": 5 * PAGE})
    subject.serves_from_disk(prompt, expected)


def test_a_page_file_that_cannot_be_read(subject: Tiered, new_prompt: NewPrompt) -> None:
    """A directory in its place: the system's error, not a missing file."""
    prompt = new_prompt(5)
    expected = subject.store_prompt(prompt)
    file = subject.pages(prompt)[1]
    file.unlink()
    file.mkdir()
    with subject.counting("read_io"):
        answer = subject.ask(prompt)
    assert (answer.bits, answer.tiers) == (expected.bits, {"l3": PAGE})
    file.rmdir()
    subject.serves_from_disk(prompt, expected)


def test_longer_leftovers_of_killed_writes(subject: Tiered, new_prompt: NewPrompt) -> None:
    known, prompt = new_prompt(1), new_prompt(5)
    expected = subject.cold(prompt)
    subject.store_prompt(known)
    (first, *_) = subject.pages(known)
    root = stored(subject.store)[bytes.fromhex(first.name[:32])].parent
    keys = page_keys(root, prompt, PAGE)
    model, tag, leftovers = first.parents[1], first.name.rpartition(".")[2], []
    for parent, key in zip([root, *keys], keys, strict=False):
        shard = model / key.hex()[:2]
        shard.mkdir(exist_ok=True)
        name = f"{key.hex()}.{parent.hex()}.{tag}"
        leftovers += [shard / f"{name}.__lock", shard / f"{name}_0123456789abcdef.__lock"]
    for leftover in leftovers:
        leftover.write_bytes(b"\xff" * 3 * OBJECT_BYTES)
    assert subject.store_prompt(prompt).bits == expected.bits
    assert [file.stat().st_size for file in subject.pages(prompt)] == [OBJECT_BYTES] * 5
    subject.serves_from_disk(prompt, expected)
    for leftover in leftovers:
        leftover.unlink()


def test_the_directory_removed(subject: Tiered, new_prompt: NewPrompt) -> None:
    prompt, other = new_prompt(5), new_prompt(5)
    expected = subject.store_prompt(prompt)
    shutil.rmtree(subject.store)
    with subject.counting("read_missing"):
        answer = subject.ask(prompt)
    assert (answer.bits, answer.tiers) == (expected.bits, {})
    assert subject.ask(other).bits == subject.cold(other).bits
    subject.serves_from_disk(prompt, expected)
    subject.serves_from_disk(other, subject.cold(other))


def test_the_directory_replaced_by_a_file(subject: Tiered, new_prompt: NewPrompt) -> None:
    prompt, other = new_prompt(5), new_prompt(5)
    expected = subject.store_prompt(prompt)
    aside = subject.store.with_suffix(".aside")
    subject.store.rename(aside)
    subject.store.write_bytes(b"")
    with subject.counting("read_missing", "write_read_only"):
        answer = subject.ask(prompt)
        assert (answer.bits, answer.tiers) == (expected.bits, {})
        assert subject.ask(other).bits == subject.cold(other).bits
        subject.drain()
    assert subject.l3.breaker == "open"
    put_back(aside, subject.store)
    subject.serves_from_disk(prompt, expected)
    subject.serves_from_disk(other, subject.cold(other))


def put_back(aside: Path, store: Path) -> None:
    store.unlink()
    aside.rename(store)
