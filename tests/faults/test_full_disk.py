"""A real file system that is full or read-only while a server uses it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.rig import OBJECT_BYTES, PAGE, Tiered, tiered

NewPrompt = Callable[[int], list[int]]

_DISK_BYTES = 80 * 2**20


def mount(*arguments: str | Path) -> bool:
    done = subprocess.run(["mount", *arguments], capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system in memory, mounted for this module."""
    path = tmp_path_factory.mktemp("disk")
    if os.geteuid() != 0 or not mount("-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", path):
        pytest.skip("mounting a file system needs root")
    yield path
    while path.is_mount():
        subprocess.run(["umount", "--lazy", path], check=True)


@pytest.fixture(scope="module")
def on_disk(disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiered]:
    with tiered(tmp_path_factory.mktemp("on_disk"), store=disk / "l3") as subject:
        yield subject


def fill(disk: Path, leave: int) -> Path:
    """Takes all but so many bytes of the room."""
    ballast, free = disk / "ballast", os.statvfs(disk)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_bsize - leave)
    return ballast


def test_a_full_disk(disk: Path, on_disk: Tiered, new_prompt: NewPrompt) -> None:
    """What the flag promised is not there any more: a few pages still fit, and then none."""
    old, new = new_prompt(5), [new_prompt(5) for _ in range(3)]
    expected = on_disk.store_prompt(old)
    ballast = fill(disk, leave=3 * OBJECT_BYTES)
    drops = on_disk.l3.drops
    with on_disk.counting("write_no_space"):
        for prompt in new:
            assert on_disk.ask(prompt).bits == on_disk.cold(prompt).bits
        on_disk.leave_to_disk()
        assert on_disk.l3.breaker == "open"
        assert on_disk.l3.drops > drops
        answer = on_disk.ask(old)
        assert (answer.bits, answer.tiers) == (expected.bits, {"l3": 5 * PAGE})
    assert not list(disk.rglob("*__lock"))
    ballast.unlink()
    for prompt in new:
        on_disk.serves_from_disk(prompt, on_disk.cold(prompt))
    on_disk.serves_from_disk(old, expected)
    on_disk.is_idle_and_empty()


def test_a_disk_that_becomes_read_only(disk: Path, on_disk: Tiered, new_prompt: NewPrompt) -> None:
    old, new = new_prompt(5), new_prompt(5)
    expected = on_disk.store_prompt(old)
    assert mount("--bind", disk, disk)
    assert mount("-o", "remount,bind,ro", disk)
    with on_disk.counting("write_read_only"):
        assert on_disk.ask(new).bits == on_disk.cold(new).bits
        on_disk.leave_to_disk()
        assert on_disk.l3.breaker == "open"
        answer = on_disk.ask(old)
        assert (answer.bits, answer.tiers) == (expected.bits, {"l3": 5 * PAGE})
        assert on_disk.evict(old) == 5
        assert on_disk.ask(old).bits == expected.bits
    subprocess.run(["umount", disk], check=True)
    on_disk.serves_from_disk(new, on_disk.cold(new))
    on_disk.serves_from_disk(old, expected)
    on_disk.is_idle_and_empty()


def test_a_directory_that_may_not_be_written(tmp_path: Path, new_prompt: NewPrompt) -> None:
    """The same by permissions, which root is not held to."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if os.access(closed, os.W_OK):
        pytest.skip("this user may write everywhere")
    with tiered(tmp_path) as subject:
        old, new = new_prompt(5), new_prompt(5)
        expected = subject.store_prompt(old)
        directories = [path for path in subject.store.rglob("*") if path.is_dir()]
        for directory in directories:
            directory.chmod(0o500)
        with subject.counting("write_read_only"):
            assert subject.ask(new).bits == subject.cold(new).bits
            subject.leave_to_disk()
            answer = subject.ask(old)
            assert (answer.bits, answer.tiers) == (expected.bits, {"l3": 5 * PAGE})
        for directory in directories:
            directory.chmod(0o700)
        subject.serves_from_disk(new, subject.cold(new))
