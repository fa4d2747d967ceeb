from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from jkv.cache.l3.faults import FaultPlan, from_environment
from jkv.cache.l3.owner import Hold
from jkv.cache.l3.reasons import Reason
from jkv.cache.l3.store import PageStore, StoreOptions
from jkv.errors import ConfigError
from tests.cache.l3.pages import (
    WAIT_S,
    assert_serves,
    chain,
    delete,
    identity,
    open_store,
    read,
    reasons,
    write,
)

MODEL = identity()
INFOS = chain(MODEL, 40)


def faulty(path: Path, plan: FaultPlan) -> PageStore:
    options = StoreOptions(location=str(path), read_threads=1, write_threads=1)
    return PageStore.open(options, MODEL, faults=plan)


def test_faults_are_outcomes_and_repeat_with_their_seed(tmp_path: Path) -> None:
    plan = FaultPlan(seed=3, read_fail=0.3, read_short=0.3, write_fail=0.4)
    runs = []
    for number in range(2):
        store = faulty(tmp_path / str(number), plan)
        written = reasons(write(store, MODEL, INFOS))
        outcomes = [read(store, store.page(info), info).reason for info in INFOS]
        runs.append((written, outcomes))
        store.close()
    assert runs[0] == runs[1]
    assert set(runs[0][0]) == {None, Reason.IO}
    assert set(runs[0][1]) == {None, Reason.IO, Reason.SIZE, Reason.MISSING}


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    store = faulty(tmp_path, FaultPlan(write_full=0.5))
    outcomes = write(store, MODEL, INFOS)
    assert set(reasons(outcomes)) == {None, Reason.NO_SPACE}
    written = [i for i, o in zip(INFOS, outcomes, strict=True) if o.reason is None]
    assert {page.key for page in store.list().own} == {info.key for info in written}
    assert_serves(store, MODEL, written)
    store.close()


def test_a_short_write_is_found_when_it_is_read(tmp_path: Path) -> None:
    store = faulty(tmp_path, FaultPlan(write_short=1.0))
    assert reasons(write(store, MODEL, INFOS[:3])) == [None] * 3
    assert read(store, store.page(INFOS[0]), INFOS[0]).reason is Reason.SIZE
    store.close()


def test_slow_operations_take_their_time(tmp_path: Path) -> None:
    store = faulty(tmp_path, FaultPlan(read_slow=1.0, write_slow=1.0, slow_s=0.05))
    started = time.monotonic()
    write(store, MODEL, INFOS[:2])
    outcome = read(store, store.page(INFOS[0]), INFOS[0])
    assert outcome.reason is None
    assert outcome.seconds >= 0.05
    assert time.monotonic() - started >= 0.15
    store.close()


def test_a_failed_delete_says_so(tmp_path: Path) -> None:
    store = faulty(tmp_path, FaultPlan(delete_fail=1.0))
    write(store, MODEL, INFOS[:1])
    assert not delete(store, store.page(INFOS[0]))
    assert len(store.list().own) == 1
    store.close()


class Switch:
    """Faults until it is turned off."""

    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan

    def turn_off(self) -> None:
        self.plan = FaultPlan()


def test_a_store_that_hangs_has_outcomes_and_keeps_nothing_that_came_late(tmp_path: Path) -> None:
    switch = Switch(FaultPlan(write_hang=1.0))
    options = StoreOptions(location=str(tmp_path), write_threads=2, change_timeout_s=0.1)
    store = PageStore.open(options, MODEL, faults=switch)
    assert set(reasons(write(store, MODEL, INFOS))) == {Reason.TIMEOUT}
    assert not delete(store, store.page(INFOS[0])), "what hangs is deleted"
    while len(late := {page.key for page in store.list().own}) < 2:
        time.sleep(0.01)
    assert len(late) == 2, "more than one write of each thread reached the store"
    switch.turn_off()
    rest = [info for info in INFOS if info.key not in late]
    while set(reasons(write(store, MODEL, rest))) != {None}:
        time.sleep(0.01)
    assert {page.key for page in store.list().own} == {info.key for info in rest}
    assert_serves(store, MODEL, rest)
    store.close()


class HangingHold:
    """A hold that is looked after on a file system that hangs, until it is let go."""

    def __init__(self, hold: Hold) -> None:
        self.release, self.answer = hold.release, threading.Event()

    @property
    def valid(self) -> bool:
        return self.answer.wait(WAIT_S)


def test_a_store_that_hangs_before_the_write_has_outcomes_too(tmp_path: Path) -> None:
    """All threads wait for the first one then, which looks whether the owner is still held."""
    options = StoreOptions(location=str(tmp_path), write_threads=2, change_timeout_s=0.1)
    store = PageStore.open(options, MODEL)
    hold = store._hold = HangingHold(store._hold)
    assert set(reasons(write(store, MODEL, INFOS))) == {Reason.TIMEOUT}
    hold.answer.set()
    while set(reasons(write(store, MODEL, INFOS[20:]))) != {None}:
        time.sleep(0.01)
    assert {page.key for page in store.list().own} == {info.key for info in INFOS[20:]}, "one ran too late"
    store.close()


def test_a_store_that_hangs_ends_and_keeps_its_owner(tmp_path: Path) -> None:
    switch = Switch(FaultPlan(write_hang=1.0))
    options = StoreOptions(location=str(tmp_path), owner="me", change_timeout_s=0.1)
    store = PageStore.open(options, MODEL, faults=switch)
    write(store, MODEL, INFOS[:1])
    store.close()
    with pytest.raises(ConfigError, match="--l3-owner me: a running engine holds it"):
        PageStore.open(options, MODEL)
    switch.turn_off()


def test_the_plan_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JKV_TEST_L3_FAULTS", '{"seed": 7, "read_fail": 1.0}')
    store = open_store(tmp_path, MODEL)
    write(store, MODEL, INFOS[:1])
    assert read(store, store.page(INFOS[0]), INFOS[0]).reason is Reason.IO
    store.close()
    monkeypatch.delenv("JKV_TEST_L3_FAULTS")
    assert from_environment() is None


def test_a_plan_in_a_file_can_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, new = tmp_path / "plan", tmp_path / "new"
    file.write_text('{"read_fail": 1.0}')
    monkeypatch.setenv("JKV_TEST_L3_FAULTS", str(file))
    store = open_store(tmp_path / "l3", MODEL)
    write(store, MODEL, INFOS[:1])
    assert read(store, store.page(INFOS[0]), INFOS[0]).reason is Reason.IO
    new.write_text("{}")
    new.replace(file)
    assert_serves(store, MODEL, INFOS[:1])
    store.close()
