from __future__ import annotations

import logging
import queue
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jkv.cache.disk_tier import is_fault
from jkv.cache.l3.faults import FaultPlan
from jkv.cache.l3.reasons import Reason
from jkv.cache.l3.store import PageStore, ReadOutcome, StoreOptions, WriteOutcome
from jkv.errors import ConfigError
from tests.cache.l3.pages import (
    WAIT_S,
    assert_serves,
    chain,
    content,
    delete,
    identity,
    open_store,
    read,
    reasons,
    write,
)

MODEL = identity()


def test_pages_come_back_after_a_restart_with_their_order_saved(tmp_path: Path) -> None:
    infos = chain(MODEL, 12)
    store = open_store(tmp_path, MODEL)
    outcomes = write(store, MODEL, infos)
    assert reasons(outcomes) == [None] * 12
    assert {outcome.bytes for outcome in outcomes} == {MODEL.object_bytes}
    assert_serves(store, MODEL, infos)
    used = [info.key for info in (*infos[6:], *infos[:6])]
    store.save_recency(used)
    store.close()

    again = open_store(tmp_path, MODEL)
    assert again.owner == store.owner
    listing = again.list()
    assert [page.key for page in listing.own] == used
    assert (listing.foreign, listing.stale) == ([], [])
    assert {(page.key, page.parent, page.salt_tag) for page in listing.own} == {
        (info.key, info.parent, info.salt_tag) for info in infos
    }
    assert_serves(again, MODEL, infos)
    again.close()


def test_pages_written_after_the_order_was_saved_are_the_newest(tmp_path: Path) -> None:
    first, second = chain(MODEL, 3), chain(MODEL, 3, start=1000)
    store = open_store(tmp_path, MODEL)
    write(store, MODEL, first)
    store.save_recency([info.key for info in reversed(first)])
    for info in second:
        write(store, MODEL, [info])
        time.sleep(0.02)  # file times are as coarse as the kernel's clock
    assert store.list()  # and the engine is killed
    store.close()
    again = open_store(tmp_path, MODEL)
    assert [page.key for page in again.list().own] == [i.key for i in (*reversed(first), *second)]
    again.close()


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 48])
def test_a_damaged_order_is_no_order(tmp_path: Path, damage: bytes) -> None:
    store = open_store(tmp_path, MODEL)
    write(store, MODEL, chain(MODEL, 3))
    store.close()
    (tmp_path / store.owner / "recency").write_bytes(damage)
    again = open_store(tmp_path, MODEL)
    assert len(again.list().own) == 3
    again.close()


def test_an_unsynced_and_a_synced_store_are_the_same(tmp_path: Path) -> None:
    infos = chain(MODEL, 3)
    store = PageStore.open(StoreOptions(location=str(tmp_path), sync=True), MODEL)
    assert reasons(write(store, MODEL, infos)) == [None] * 3
    store.close()
    again = open_store(f"file://{tmp_path}", MODEL)
    assert_serves(again, MODEL, infos)
    again.close()


def test_a_page_that_is_not_there_is_missing(tmp_path: Path) -> None:
    store = open_store(tmp_path, MODEL)
    (info,) = chain(MODEL, 1)
    assert read(store, store.page(info), info).reason is Reason.MISSING
    write(store, MODEL, [info])
    assert delete(store, store.page(info))
    assert read(store, store.page(info), info).reason is Reason.MISSING
    assert delete(store, store.page(info)), "what is gone takes no room"
    assert store.list().own == []
    store.close()


def test_operations_on_a_key_keep_their_order(tmp_path: Path) -> None:
    store = open_store(tmp_path, MODEL)
    infos = chain(MODEL, 20)
    done: queue.SimpleQueue[object] = queue.SimpleQueue()
    for _ in range(5):
        for info in infos:
            store.write(info, lambda info=info: content(MODEL, info), done.put)
            store.delete(store.page(info), done.put)
    for info in infos[::2]:
        store.write(info, lambda info=info: content(MODEL, info), done.put)
    store.close()
    assert {page.key for page in store.list().own} == {info.key for info in infos[::2]}
    assert done.qsize() == 5 * 2 * 20 + 10


@pytest.mark.parametrize(
    "other", [identity("other weights"), identity(kv_dtype="bfloat16"), identity(page_size=16)]
)
def test_models_share_a_directory_and_never_match(tmp_path: Path, other: object) -> None:
    infos = chain(MODEL, 4)
    store = open_store(tmp_path, MODEL)
    write(store, MODEL, infos)
    store.close()

    second = open_store(tmp_path, other)  # type: ignore[arg-type]
    assert second.owner == store.owner
    listing = second.list()
    assert (listing.own, listing.foreign) == ([], [])
    assert {stale.page.key for stale in listing.stale} == {info.key for info in infos}
    assert {stale.cost for stale in listing.stale} == {store.page_cost}
    same_key = chain(other, 1)[0]  # type: ignore[arg-type]
    assert read(second, second.page(same_key), same_key).reason is Reason.MISSING
    for stale in listing.stale[:2]:
        assert delete(second, stale.page)
    second.close()

    back = open_store(tmp_path, MODEL)
    assert len(back.list().own) == 2
    back.close()


def test_models_without_pages_leave_nothing_behind(tmp_path: Path) -> None:
    store = open_store(tmp_path, MODEL)
    (info,) = chain(MODEL, 1)
    write(store, MODEL, [info])
    assert delete(store, store.page(info))
    store.close()
    open_store(tmp_path, identity("other")).close()
    assert not (tmp_path / store.owner / MODEL.model8).exists()


def test_salts_have_pages_of_their_own(tmp_path: Path) -> None:
    store = open_store(tmp_path, MODEL)
    salted, plain = chain(MODEL, 2, salt="a"), chain(MODEL, 2)
    write(store, MODEL, salted)
    for mine, other in zip(plain, salted, strict=True):
        assert read(store, store.page(mine), mine).reason is Reason.MISSING
        assert mine.salt_tag != other.salt_tag
    store.close()


def test_cancelled_reads_answer_at_once_and_once(tmp_path: Path) -> None:
    infos = chain(MODEL, 40)
    options = StoreOptions(location=str(tmp_path), read_threads=2)
    store = PageStore.open(options, MODEL, faults=FaultPlan(read_slow=1.0, slow_s=60.0))
    write(store, MODEL, infos)
    outcomes: queue.SimpleQueue[ReadOutcome] = queue.SimpleQueue()
    cancels = [store.read(store.page(info), info, outcomes.put) for info in infos]
    assert outcomes.empty()
    for cancel in cancels:
        cancel()
        cancel()
    assert outcomes.qsize() == 40, "cancelling answers before it returns"
    store.close()
    assert {outcomes.get_nowait().reason for _ in infos} == {Reason.CANCELLED}
    assert outcomes.empty()


def test_cancelling_a_finished_read_changes_nothing(tmp_path: Path) -> None:
    (info,) = chain(MODEL, 1)
    store = open_store(tmp_path, MODEL)
    write(store, MODEL, [info])
    outcomes: queue.SimpleQueue[ReadOutcome] = queue.SimpleQueue()
    cancel = store.read(store.page(info), info, outcomes.put)
    assert outcomes.get(timeout=WAIT_S).reason is None
    cancel()
    store.close()
    assert outcomes.empty()


def test_closing_finishes_writes_and_refuses_the_rest(tmp_path: Path) -> None:
    infos = chain(MODEL, 30)
    store = open_store(tmp_path, MODEL)
    written: queue.SimpleQueue[WriteOutcome] = queue.SimpleQueue()
    for info in infos:
        store.write(info, lambda info=info: content(MODEL, info), written.put)
    store.close()
    store.close()
    assert written.qsize() == 30
    assert {written.get_nowait().reason for _ in infos} == {None}
    assert [o.reason for o in write(store, MODEL, infos[:1])] == [Reason.CLOSED]
    assert read(store, store.page(infos[0]), infos[0]).reason is Reason.CLOSED
    assert not delete(store, store.page(infos[0]))
    assert len(store.list().own) == 30


def test_the_budget_paces_and_survives_a_restart(tmp_path: Path) -> None:
    infos = chain(MODEL, 6)
    size = MODEL.object_bytes
    options = StoreOptions(
        location=str(tmp_path), write_bytes_per_s=size / 0.05, daily_write_bytes=4 * size, write_threads=2
    )
    store = PageStore.open(options, MODEL)
    started = time.monotonic()
    assert reasons(write(store, MODEL, infos)).count(Reason.BUDGET) == 2
    assert time.monotonic() - started >= 0.15
    store.close()
    again = PageStore.open(options, MODEL)
    assert reasons(write(again, MODEL, infos[:1])) == [Reason.BUDGET]
    again.close()


def test_the_budget_does_not_hold_up_the_end(tmp_path: Path) -> None:
    infos = chain(MODEL, 4)
    store = PageStore.open(StoreOptions(location=str(tmp_path), write_bytes_per_s=1.0), MODEL)
    written: queue.SimpleQueue[WriteOutcome] = queue.SimpleQueue()
    for info in infos:
        store.write(info, lambda info=info: content(MODEL, info), written.put)
    closer = threading.Thread(target=store.close)
    closer.start()
    closer.join(timeout=WAIT_S)
    assert not closer.is_alive()
    assert {written.get_nowait().reason for _ in infos} == {None}


def test_a_page_that_was_lost_on_the_device_is_no_fault_of_the_store(tmp_path: Path) -> None:
    store = open_store(tmp_path, MODEL)
    (info,) = chain(MODEL, 1)
    outcomes: queue.SimpleQueue[WriteOutcome] = queue.SimpleQueue()

    def lost() -> np.ndarray:
        raise RuntimeError("the step that computes it failed")

    store.write(info, lost, outcomes.put)
    reason = outcomes.get(timeout=WAIT_S).reason
    assert reason is Reason.LOST
    assert not is_fault(reason)
    assert store.list().own == []
    store.close()


def test_a_page_that_cannot_be_had_is_an_outcome(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path, MODEL)
    (info,) = chain(MODEL, 1)
    outcomes: queue.SimpleQueue[WriteOutcome] = queue.SimpleQueue()
    with caplog.at_level(logging.CRITICAL):
        store.write(info, lambda: np.zeros(3, np.uint8), outcomes.put)
        assert outcomes.get(timeout=WAIT_S).reason is Reason.IO
    assert reasons(write(store, MODEL, [info])) == [None]
    store.close()


def test_a_page_that_cannot_be_verified_is_an_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path, MODEL)
    (info,) = chain(MODEL, 1)
    write(store, MODEL, [info])

    def verify(*args: object) -> None:
        raise MemoryError("not foreseen")

    with caplog.at_level(logging.CRITICAL), monkeypatch.context() as patched:
        patched.setattr("jkv.cache.l3.format.verify", verify)
        assert read(store, store.page(info), info).reason is Reason.IO
    assert_serves(store, MODEL, [info])
    store.close()


@pytest.mark.parametrize("location", ["ftp://host/x", "zarr://x", "file://"])
def test_a_location_that_cannot_be_used_is_refused(location: str) -> None:
    with pytest.raises(ConfigError, match=r"--l3-dir .*cannot be used"):
        open_store(location, MODEL)


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="--l3-dir"):
        open_store(tmp_path / "file", MODEL)
    with pytest.raises(ConfigError, match="--l3-dir"):
        open_store(tmp_path / "file" / "below", MODEL)


def test_ten_thousand_pages_are_listed_quickly(tmp_path: Path) -> None:
    store = open_store(tmp_path, MODEL)
    infos = chain(MODEL, 10_000)
    for info in infos:
        path = tmp_path / store.page(info).name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    store.save_recency([info.key for info in infos[:5_000]])
    store.close()
    started = time.perf_counter()
    again = open_store(tmp_path, MODEL)
    assert len(again.list().own) == 10_000
    assert time.perf_counter() - started < 2.0
    again.close()


def test_a_writes_time_is_without_that_for_its_data(tmp_path: Path) -> None:
    store, (info,) = open_store(tmp_path, MODEL), chain(MODEL, 1)
    outcomes: queue.SimpleQueue[WriteOutcome] = queue.SimpleQueue()

    def late() -> np.ndarray:
        time.sleep(0.5)
        return content(MODEL, info)

    store.write(info, late, outcomes.put)
    outcome = outcomes.get(timeout=WAIT_S)
    assert outcome.reason is None
    assert 0 < outcome.seconds < 0.4
    store.close()


def test_engines_that_see_the_same_store_find_the_same_token(tmp_path: Path) -> None:
    model = identity()
    first = open_store(tmp_path, model)
    second = open_store(f"file://{tmp_path}", model)
    elsewhere = open_store(tmp_path / "elsewhere", model)
    assert first.place.token == second.place.token
    assert first.place.token != elsewhere.place.token
    assert first.place.owner != second.place.owner
    for store in (first, second, elsewhere):
        store.close()
    again = open_store(tmp_path, model)
    assert again.place.token == first.place.token
    again.close()
