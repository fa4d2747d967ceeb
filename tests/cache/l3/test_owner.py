from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tensorstore as ts

from jkv.cache.l3 import owner as owners
from jkv.cache.l3.objects import KvObjects
from jkv.cache.l3.owner import LEASE_S, ORPHANED_AFTER_S, LeaseHold
from jkv.cache.l3.reasons import Reason
from jkv.cache.l3.store import PageStore, StoreOptions
from jkv.errors import ConfigError
from tests.cache.l3.pages import (
    assert_serves,
    chain,
    identity,
    open_store,
    quarantine,
    read,
    reasons,
    write,
)

MODEL = identity()

HOLDER = """
import sys, time
from tests.cache.l3.pages import chain, identity, open_store, write
store = open_store(sys.argv[1], identity())
write(store, identity(), chain(identity(), 3))
print(store.owner, flush=True)
time.sleep(60)
"""


def test_engines_on_one_directory_read_each_others_pages(tmp_path: Path) -> None:
    mine, others = chain(MODEL, 3), chain(MODEL, 3, start=100)
    one, two = open_store(tmp_path, MODEL), open_store(tmp_path, MODEL)
    assert one.owner != two.owner
    write(one, MODEL, mine)
    write(two, MODEL, others)
    listing = one.list()
    assert {page.key for page in listing.own} == {info.key for info in mine}
    assert {page.key for page in listing.foreign} == {info.key for info in others}
    for info in others:
        assert read(one, two.page(info), info).reason is None
    with pytest.raises(AssertionError, match="another owner"):
        one.delete(two.page(others[0]))
    one.close()
    two.close()


def test_a_bad_page_of_another_owner_is_only_remembered(tmp_path: Path) -> None:
    infos = chain(MODEL, 3)
    one, two = open_store(tmp_path, MODEL), open_store(tmp_path, MODEL)
    write(two, MODEL, infos)
    path = tmp_path / two.page(infos[0]).name
    os.truncate(path, 10)
    assert read(one, two.page(infos[0]), infos[0]).reason is Reason.SIZE
    one.quarantine(two.page(infos[0]))
    assert {page.key for page in one.list().foreign} == {info.key for info in infos[1:]}
    assert path.exists()
    assert quarantine(two, two.page(infos[0]))
    one.close()
    two.close()


def test_after_a_restart_each_engine_has_its_pages_again(tmp_path: Path) -> None:
    """Also where they serve different models and come back in another order."""
    other = identity("other")
    one, two = open_store(tmp_path, MODEL), open_store(tmp_path, other)
    write(one, MODEL, chain(MODEL, 2))
    write(two, other, chain(other, 2))
    one.close()
    two.close()
    two_again, one_again = open_store(tmp_path, other), open_store(tmp_path, MODEL)
    assert (one_again.owner, two_again.owner) == (one.owner, two.owner)
    assert_serves(one_again, MODEL, chain(MODEL, 2))
    assert_serves(two_again, other, chain(other, 2))
    one_again.close()
    two_again.close()


def test_a_given_owner_is_kept_and_held(tmp_path: Path) -> None:
    store = open_store(tmp_path, MODEL, owner="blue")
    assert store.owner == "blue"
    with pytest.raises(ConfigError, match="--l3-owner blue: a running engine holds it"):
        open_store(tmp_path, MODEL, owner="blue")
    store.close()
    again = open_store(tmp_path, MODEL, owner="blue")
    again.close()


def test_a_new_model_takes_over_the_room_of_an_idle_one(tmp_path: Path) -> None:
    """So that one engine at a time never takes more than its cap."""
    full, empty = open_store(tmp_path, MODEL, owner="full"), open_store(tmp_path, MODEL, owner="empty")
    write(full, MODEL, chain(MODEL, 3))
    full.close()
    empty.close()
    store = open_store(tmp_path, identity("other"))
    assert store.owner == "full"
    assert len(store.list().stale) == 3
    store.close()


@pytest.mark.parametrize("owner", ["", ".", "..", "a/b", "a b", ".hidden", "x" * 65])
def test_an_owner_that_is_no_name_is_refused(tmp_path: Path, owner: str) -> None:
    with pytest.raises(ConfigError, match="--l3-owner"):
        open_store(tmp_path, MODEL, owner=owner)
    assert list(tmp_path.iterdir()) == []


def test_sigkill_frees_the_owner_and_keeps_what_was_published(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        owner = process.stdout.readline().strip()
        with pytest.raises(ConfigError, match="--l3-owner"):
            open_store(tmp_path, MODEL, owner=owner)
        process.send_signal(signal.SIGKILL)
        process.wait()
    store = open_store(tmp_path, MODEL)
    assert store.owner == owner
    assert len(store.list().own) == 3
    assert_serves(store, MODEL, chain(MODEL, 3))
    store.close()


def test_long_abandoned_owners_are_collected(tmp_path: Path) -> None:
    stores = [open_store(tmp_path, MODEL, owner=name) for name in ("old", "recent", "running")]
    for store in stores:
        write(store, MODEL, chain(MODEL, 2))
    for store in stores[:2]:
        store.close()
    long_ago = time.time() - ORPHANED_AFTER_S - 60
    for name in ("old", "running"):
        os.utime(tmp_path / name / "lock", (long_ago, long_ago))
    new = open_store(tmp_path, MODEL, owner="new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "recent", "running", "store-token"]
    assert len(new.list().foreign) == 4
    new.close()
    stores[2].close()


class Clocks:
    """Stands for the owner module's `time`."""

    def __init__(self) -> None:
        self.now = 1e9

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(owners, "time", clocks)
    return clocks


@pytest.fixture
def objects() -> KvObjects:
    """A store without a file system: all that opens it shares its memory."""
    return KvObjects(ts.KvStore.open({"driver": "memory"}, context=ts.Context()).result(), None)


def test_a_lease_is_held_until_it_runs_out(objects: KvObjects, clocks: Clocks) -> None:
    first = LeaseHold.try_claim(objects, "x")
    assert first is not None
    assert first.valid
    clocks.now += LEASE_S
    assert not first.valid, "its holder stops in time"
    assert LeaseHold.try_claim(objects, "x") is None, "before anybody else may start"
    clocks.now += LEASE_S
    second = LeaseHold.try_claim(objects, "x")
    assert second is not None
    first.release()
    assert LeaseHold.try_claim(objects, "x") is None, "a former holder releases nothing"
    second.release()
    third = LeaseHold.try_claim(objects, "x")
    assert third is not None
    third.release()


def test_a_holder_learns_that_another_took_over(
    objects: KvObjects, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "LEASE_S", 0.06)
    first = LeaseHold.try_claim(objects, "x")
    assert first is not None
    deadline = time.monotonic() + 10
    before, _ = objects.read_generation("x/lock")
    clocks.now += 1
    while objects.read_generation("x/lock")[0] == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert objects.read_generation("x/lock")[0] != before, "the lease is renewed"
    objects.write("x/lock", b'{"holder": "another", "renewed": 0}').result()
    while first.valid and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not first.valid
    first.release()


class _LosesAnswers(KvObjects):
    """A write is done, its answer is lost, and its repetition finds what it has written."""

    lost = 0

    def replace(self, name: str, data: bytes, generation: bytes) -> bytes | None:
        if super().replace(name, data, generation) is None:
            return None
        self.lost += 1
        return super().replace(name, data, generation)


def test_a_holder_whose_answers_are_lost_keeps_its_lease(
    objects: KvObjects, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "LEASE_S", 0.06)
    flaky = _LosesAnswers(objects._kv, None)
    hold = LeaseHold.try_claim(flaky, "x")
    assert hold is not None
    deadline = time.monotonic() + 10
    while flaky.lost < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert flaky.lost >= 4, "the lease is renewed"
    assert hold.valid
    assert LeaseHold.try_claim(flaky, "x") is None
    hold.release()
    assert LeaseHold.try_claim(objects, "x") is not None


class _Breaks(KvObjects):
    """Fails now and then with what nobody has foreseen."""

    calls = 0

    def replace(self, name: str, data: bytes, generation: bytes) -> bytes | None:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("not foreseen")
        return super().replace(name, data, generation)


def test_a_lease_is_renewed_again_after_an_unforeseen_error(
    objects: KvObjects, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(owners, "LEASE_S", 0.06)
    breaks = _Breaks(objects._kv, None)
    with caplog.at_level(logging.CRITICAL):
        hold = LeaseHold.try_claim(breaks, "x")
        assert hold is not None
        deadline = time.monotonic() + 10
        while breaks.calls < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert breaks.calls >= 4, "the lease is renewed"
    hold.release()


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b'{"holder": 1, "renewed": "x"}'])
def test_a_damaged_lease_is_free(objects: KvObjects, damage: bytes) -> None:
    objects.write("x/lock", damage).result()
    hold = LeaseHold.try_claim(objects, "x")
    assert hold is not None
    hold.release()


def test_a_store_without_a_file_system(objects: KvObjects) -> None:
    infos = chain(MODEL, 5)
    options = StoreOptions(location="memory://")
    one, two = PageStore(objects, options, MODEL), PageStore(objects, options, MODEL)
    assert one.owner != two.owner
    assert one.page_cost == MODEL.object_bytes
    assert reasons(write(one, MODEL, infos)) == [None] * 5
    assert {page.key for page in two.list().foreign} == {info.key for info in infos}
    assert read(two, one.page(infos[0]), infos[0]).reason is None
    one.save_recency([info.key for info in reversed(infos)])
    one.close()
    two.close()
    again = PageStore(objects, options, MODEL)
    assert [page.key for page in again.list().own] == [info.key for info in reversed(infos)]
    assert quarantine(again, again.page(infos[0]))
    assert len(objects.list(f"{again.owner}/quarantine/")) == 1
    again.close()
    other = PageStore(objects, StoreOptions(location="memory://", owner=again.owner), identity("other"))
    assert len(other.list().stale) == 4
    other.close()
    assert objects.list(f"{again.owner}/quarantine/") == []


def test_a_holder_whose_lease_ran_out_writes_nothing(objects: KvObjects, clocks: Clocks) -> None:
    store = PageStore(objects, StoreOptions(location="memory://"), MODEL)
    infos = chain(MODEL, 1)
    clocks.now += LEASE_S
    assert reasons(write(store, MODEL, infos)) == [Reason.READ_ONLY]
    store.close()
