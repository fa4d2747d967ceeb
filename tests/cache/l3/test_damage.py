"""What happens to files behind the store's back, on a real file system."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jkv.cache.l3.format import HEADER_BYTES
from jkv.cache.l3.housekeeping import QUARANTINE_MAX
from jkv.cache.l3.reasons import Reason
from jkv.cache.l3.store import PageStore
from tests.cache.l3.pages import (
    assert_serves,
    chain,
    content,
    identity,
    open_store,
    quarantine,
    read,
    reasons,
    write,
)

MODEL = identity()
INFOS = chain(MODEL, 8)


def flip(position: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)

    return damage


def cut(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"stale tail")


HALF = HEADER_BYTES + MODEL.page_bytes // 2
DAMAGES = {
    "header": (flip(40), Reason.CORRUPT),
    "header's padding": (flip(HEADER_BYTES - 100), Reason.CORRUPT),
    "K": (flip(HEADER_BYTES), Reason.CORRUPT),
    "V": (flip(HALF), Reason.CORRUPT),
    "tail": (flip(-1), Reason.CORRUPT),
    "version": (flip(8), Reason.VERSION),
    "empty": (cut(0), Reason.SIZE),
    "one byte short": (cut(MODEL.object_bytes - 1), Reason.SIZE),
    "longer": (lengthen, Reason.SIZE),
    "gone": (Path.unlink, Reason.MISSING),
}


@pytest.fixture
def store(tmp_path: Path):
    store = open_store(tmp_path, MODEL)
    assert reasons(write(store, MODEL, INFOS)) == [None] * len(INFOS)
    yield store
    store.close()


def path_of(tmp_path: Path, store: PageStore, number: int) -> Path:
    return tmp_path / store.page(INFOS[number]).name


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_its_page_written_again(tmp_path: Path, store: PageStore, damage: str) -> None:
    harm, reason = DAMAGES[damage]
    harm(path_of(tmp_path, store, 3))
    outcome = read(store, store.page(INFOS[3]), INFOS[3])
    assert (outcome.reason, outcome.data) == (reason, None)
    assert_serves(store, MODEL, INFOS[:3])
    assert quarantine(store, store.page(INFOS[3]))
    assert not path_of(tmp_path, store, 3).exists()
    assert reasons(write(store, MODEL, [INFOS[3]])) == [None]
    assert_serves(store, MODEL, INFOS)


def test_swapped_files_are_no_match(tmp_path: Path, store: PageStore) -> None:
    one, two, aside = path_of(tmp_path, store, 1), path_of(tmp_path, store, 2), tmp_path / "aside"
    one.rename(aside)
    two.rename(one)
    aside.rename(two)
    for number in (1, 2):
        assert read(store, store.page(INFOS[number]), INFOS[number]).reason is Reason.MISMATCH


def test_a_page_of_another_model_under_this_ones_name_is_no_match(tmp_path: Path, store: PageStore) -> None:
    other = identity("other")
    second = open_store(tmp_path, other, owner="second")
    foreign = chain(other, 1)
    write(second, other, foreign)
    second.close()
    shutil.copy(tmp_path / second.page(foreign[0]).name, path_of(tmp_path, store, 0))
    assert read(store, store.page(INFOS[0]), INFOS[0]).reason is Reason.MISMATCH


def test_a_few_bad_pages_are_kept_until_the_next_start(tmp_path: Path, store: PageStore) -> None:
    for number, info in enumerate(INFOS):
        flip(-1)(path_of(tmp_path, store, number))
        assert quarantine(store, store.page(info))
    kept = list((tmp_path / store.owner / "quarantine").iterdir())
    assert len(kept) == QUARANTINE_MAX
    assert {path.stat().st_size for path in kept} == {MODEL.object_bytes}
    assert store.list().own == []
    store.close()
    open_store(tmp_path, MODEL).close()
    assert not list(tmp_path.glob("*/quarantine/*"))


def test_what_killed_writes_left_is_swept_and_never_published(tmp_path: Path, store: PageStore) -> None:
    """TensorStore's own locking would reuse these, which are longer, and publish their tails."""
    new = chain(MODEL, 2, start=500)
    for info in (*INFOS[:2], *new):
        path = tmp_path / store.page(info).name
        path.parent.mkdir(exist_ok=True)
        for suffix in (".__lock", "_0123456789abcdef.__lock"):
            (path.parent / (path.name + suffix)).write_bytes(b"\xff" * 3 * MODEL.object_bytes)
    assert len(store.list().own) == len(INFOS)
    assert reasons(write(store, MODEL, new)) == [None, None]
    assert_serves(store, MODEL, [*INFOS, *new])
    store.close()
    again = open_store(tmp_path, MODEL)
    assert not list(tmp_path.rglob("*__lock"))
    assert_serves(again, MODEL, [*INFOS, *new])
    again.close()


def test_leftovers_of_a_living_owner_are_let_alone(tmp_path: Path, store: PageStore) -> None:
    leftover = path_of(tmp_path, store, 0).with_suffix(".x.__lock")
    leftover.write_bytes(b"being written")
    other = open_store(tmp_path, MODEL)
    assert other.owner != store.owner
    assert leftover.exists()
    other.close()


@pytest.mark.parametrize("about", [None, b"", b"{}", b'{"object_bytes": "x"}'])
def test_a_model_whose_description_is_damaged_keeps_its_pages(tmp_path: Path, about: bytes | None) -> None:
    store = open_store(tmp_path, MODEL)
    write(store, MODEL, INFOS)
    store.close()
    path = tmp_path / store.owner / MODEL.model8 / "about"
    sound = path.read_bytes()
    if about is None:
        path.unlink()
    else:
        path.write_bytes(about)
    again = open_store(tmp_path, MODEL)
    assert_serves(again, MODEL, INFOS)
    assert path.read_bytes() == sound
    again.close()


def test_pages_of_another_model_of_unknown_size_are_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path, MODEL)
    write(store, MODEL, INFOS)
    store.close()
    (tmp_path / store.owner / MODEL.model8 / "about").write_bytes(b"")
    other = open_store(tmp_path, identity("other"))
    assert other.list().stale == []
    assert not list(tmp_path.glob(f"*/{MODEL.model8}/*"))
    other.close()


def test_foreign_objects_in_the_directory_are_ignored(tmp_path: Path, store: PageStore) -> None:
    (tmp_path / "README").write_text("mine")
    (tmp_path / store.owner / MODEL.model8 / "00").mkdir(exist_ok=True)
    (tmp_path / store.owner / MODEL.model8 / "00" / "note.txt").write_text("mine")
    assert len(store.list().own) == len(INFOS)
    store.close()
    again = open_store(tmp_path, MODEL)
    assert (tmp_path / "README").read_text() == "mine"
    again.close()


def test_a_removed_directory_is_made_again(tmp_path: Path) -> None:
    root = tmp_path / "l3"
    store = open_store(root, MODEL)
    write(store, MODEL, INFOS)
    shutil.rmtree(root)
    assert read(store, store.page(INFOS[0]), INFOS[0]).reason is Reason.MISSING
    assert store.list().own == []
    assert reasons(write(store, MODEL, INFOS)) == [None] * len(INFOS)
    assert_serves(store, MODEL, INFOS)
    other = open_store(root, MODEL)
    assert other.owner != store.owner, "the owner is held again"
    assert len(other.list().foreign) == len(INFOS)
    other.close()
    store.close()


def test_reads_are_bytes_of_their_own(tmp_path: Path, store: PageStore) -> None:
    """A page that was read stays as it was when its file goes."""
    outcome = read(store, store.page(INFOS[0]), INFOS[0])
    flip(-1)(path_of(tmp_path, store, 0))
    path_of(tmp_path, store, 0).unlink()
    assert outcome.data is not None
    assert np.array_equal(outcome.data, content(MODEL, INFOS[0]))
