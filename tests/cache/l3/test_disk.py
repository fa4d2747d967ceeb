"""Room on a real file system: what pages cost, and what happens when there is none or it is read-only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jkv.cache.l3.reasons import Reason
from jkv.errors import ConfigError
from tests.cache.l3.pages import (
    assert_serves,
    chain,
    delete,
    identity,
    open_store,
    quarantine,
    read,
    reasons,
    write,
)

MODEL = identity()
INFOS = chain(MODEL, 200)


def disk_usage(path: Path) -> int:
    return int(subprocess.check_output(["du", "-s", "-B1", path], text=True).split()[0])


def test_pages_cost_what_du_says(tmp_path: Path) -> None:
    """Through 5 generations of pages, with some in quarantine and all that an owner keeps beside them."""
    root, keep = tmp_path / "l3", 400
    store = open_store(root, MODEL)
    bound = keep * store.page_cost + store.overhead_bytes
    for generation in range(5):
        infos = chain(MODEL, keep, start=generation * 10_000)
        if generation:
            for info in chain(MODEL, keep, start=(generation - 1) * 10_000)[:-10]:
                store.delete(store.page(info))
            for info in chain(MODEL, keep, start=(generation - 1) * 10_000)[-10:]:
                quarantine(store, store.page(info))
        write(store, MODEL, infos)
        store.save_recency([info.key for info in infos])
        assert disk_usage(root) <= bound
    assert disk_usage(root) > keep * MODEL.object_bytes
    store.close()
    assert disk_usage(root) <= bound


def test_pages_of_other_models_cost_what_du_says(tmp_path: Path) -> None:
    root = tmp_path / "l3"
    costs: set[int] = set()
    for model in [identity(name, heads=heads) for heads, name in enumerate(("a", "b", "c"), 1)]:
        store = open_store(root, model)
        write(store, model, chain(model, 100))
        listing = store.list()
        room = len(listing.own) * store.page_cost + sum(stale.cost for stale in listing.stale)
        assert disk_usage(root) <= room + store.overhead_bytes
        costs |= {stale.cost for stale in listing.stale}
        store.close()
    assert len(costs) == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, mounted for this test."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], capture_output=True, check=False
        ).returncode
    )
    if not mounted:
        pytest.skip("mounting a file system needs root")
    yield path
    while path.is_mount():
        subprocess.run(["umount", "--lazy", path], check=True)


def test_a_full_disk_refuses_writes_until_there_is_room(small_disk: Path) -> None:
    store = open_store(small_disk / "l3", MODEL)
    outcomes = write(store, MODEL, INFOS)
    written = [i for i, o in zip(INFOS, outcomes, strict=True) if o.reason is None]
    assert set(reasons(outcomes)) == {None, Reason.NO_SPACE}
    assert not list(small_disk.rglob("*__lock"))
    assert_serves(store, MODEL, written)
    assert {page.key for page in store.list().own} == {info.key for info in written}
    for info in written[:2]:
        assert delete(store, store.page(info))
    assert reasons(write(store, MODEL, written[:1])) == [None]
    store.close()


def test_a_full_disk_can_be_opened(small_disk: Path) -> None:
    store = open_store(small_disk / "l3", MODEL)
    write(store, MODEL, INFOS)
    store.close()
    other = identity("other", heads=1)
    for model in (MODEL, other, MODEL):
        again = open_store(small_disk / "l3", model)
        assert again.list().own or again.list().stale
        again.close()


def test_a_disk_that_becomes_read_only_still_serves(small_disk: Path) -> None:
    store = open_store(small_disk / "l3", MODEL)
    infos = INFOS[:10]
    write(store, MODEL, infos)
    subprocess.run(["mount", "--bind", small_disk, small_disk], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", small_disk], check=True)
    assert reasons(write(store, MODEL, INFOS[10:12])) == [Reason.READ_ONLY] * 2
    assert not delete(store, store.page(infos[0]))
    assert not quarantine(store, store.page(infos[0]))
    store.save_recency([])
    assert_serves(store, MODEL, infos)
    with pytest.raises(ConfigError, match="--l3-dir"):
        open_store(small_disk / "l3", MODEL)
    subprocess.run(["umount", small_disk], check=True)
    assert reasons(write(store, MODEL, INFOS[10:12])) == [None] * 2
    store.close()


def test_a_directory_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="--l3-dir"):
        open_store(tmp_path, MODEL)
    tmp_path.chmod(0o700)


def test_a_page_that_cannot_be_read_is_an_error_not_a_miss(tmp_path: Path) -> None:
    store = open_store(tmp_path, MODEL)
    path = tmp_path / store.page(INFOS[0]).name
    path.mkdir(parents=True)
    assert read(store, store.page(INFOS[0]), INFOS[0]).reason is Reason.IO
    assert reasons(write(store, MODEL, INFOS[:1])) == [Reason.IO]
    store.close()
