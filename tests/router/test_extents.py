"""Extents against a model of etcd: records say in the end what the store holds, for few writes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.router.extents import EXTENT_PAGES, ExtentMap, ExtentOp, ExtentPut


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


class Records:
    """etcd's side."""

    def __init__(self) -> None:
        self.extents: dict[int, tuple[bytes, ...]] = {}

    def apply(self, ops: list[ExtentOp]) -> None:
        assert len({op.number for op in ops}) == len(ops), "etcd takes a key once in a transaction"
        for op in ops:
            if isinstance(op, ExtentPut):
                assert 0 < len(op.keys) <= EXTENT_PAGES
                self.extents[op.number] = op.keys
            else:
                self.extents.pop(op.number, None)

    @property
    def keys(self) -> list[bytes]:
        return [key for number in sorted(self.extents) for key in self.extents[number]]


def loaded(records: Records | None = None, held: list[bytes] | None = None) -> ExtentMap:
    extents = ExtentMap()
    extents.add(held or [])
    extents.load(sorted(records.extents.items()) if records else [])
    while not extents.finish_load(100):
        pass
    return extents


def write(extents: ExtentMap, records: Records, *, everything: bool = False, idle: bool = False) -> None:
    while ops := extents.plan(100, everything=everything, idle=idle):
        records.apply(ops)
        extents.commit(ops)


def test_pages_are_recorded_in_the_order_of_writing_when_an_extent_is_full() -> None:
    extents, records = loaded(), Records()
    keys = [key(number) for number in range(150)]
    extents.add(keys)
    write(extents, records)
    assert records.keys == keys[:128]
    assert extents.stats.unsaved == 22
    write(extents, records, everything=True)
    assert records.keys == keys
    extents.add([key(150)])
    write(extents, records, everything=True)
    assert records.keys == [*keys, key(150)]
    assert len(records.extents) == 3


def test_what_is_not_due_is_written_when_idle_for_few_writes() -> None:
    extents, records = loaded(), Records()
    extents.add(key(number) for number in range(20))
    write(extents, records, idle=True)
    assert not records.extents
    extents.add(key(number) for number in range(20, 200))
    write(extents, records, idle=True)
    assert len(records.keys) == 200


def _ops_per_page(extents: ExtentMap) -> float:
    stats = extents.stats
    return (stats.puts + stats.deletes) / stats.pages_added


@pytest.mark.parametrize("step", [1, 7, 64, 1000])
def test_writing_alone_takes_at_most_one_put_per_32_pages(step: int) -> None:
    extents, records = loaded(), Records()
    for start in range(0, 20_000, step):
        extents.add(key(number) for number in range(start, start + step))
        write(extents, records, idle=True)
    assert _ops_per_page(extents) <= 1 / 32


@pytest.mark.parametrize("order", ["lru", "random", "mostly lru"])
def test_full_churn_takes_at_most_one_write_per_4_pages(order: str) -> None:
    """Every page written evicts one of 4,000; the fill at the start is not counted."""
    rng = random.Random(7)
    extents, records = loaded(), Records()
    held = list(range(4_000))
    extents.add(map(key, held))
    write(extents, records)
    filled = extents.stats
    for number in range(4_000, 24_000):
        if order == "lru":
            place = 0
        else:
            place = rng.randrange(len(held) if order == "random" or rng.random() < 0.1 else 50)
        victim = held.pop(place)
        held.append(number)
        extents.remove([key(victim)])
        extents.add([key(number)])
        if number % 20 == 0:
            write(extents, records, idle=number % 100 == 0)
    stats = extents.stats
    writes = stats.puts + stats.deletes - filled.puts - filled.deletes
    share = writes / (stats.pages_added - filled.pages_added)
    recorded = set(records.keys)
    lag = len(set(map(key, held)) - recorded)
    stale = len(recorded - set(map(key, held)))
    print(f"{order}: {share:.3f} writes a page, {lag} not recorded, {stale} stale of {len(recorded)}")
    assert share <= 1 / 4
    assert lag <= 2 * EXTENT_PAGES
    assert stale <= 0.25 * len(held)
    assert len(records.extents) <= 4 * len(held) / EXTENT_PAGES
    write(extents, records, everything=True)
    assert set(records.keys) == set(map(key, held))


def test_a_restart_finds_its_records_and_writes_only_what_differs() -> None:
    extents, records = loaded(), Records()
    keys = [key(number) for number in range(640)]
    extents.add(keys)
    write(extents, records)
    again = loaded(records, [*keys[1:], key(1000)])
    again.check()
    write(again, records)
    assert again.stats.puts == 0
    write(again, records, everything=True)
    assert again.stats.puts == 2  # the extent that lost a page, and one for the new page
    assert records.keys == [*keys[1:], key(1000)]


def test_restarts_go_on_with_the_last_extent() -> None:
    records, held = Records(), []
    for number in range(80):
        held.append(key(number))
        write(loaded(records, held), records, everything=True)
    assert records.keys == held
    assert len(records.extents) == 2


def test_a_restart_merges_what_became_small() -> None:
    extents, records = loaded(), Records()
    keys = [key(number) for number in range(640)]
    extents.add(keys)
    write(extents, records, everything=True)
    held = keys[::8]
    write(loaded(records, held), records, everything=True)
    assert sorted(records.keys) == sorted(held)
    assert len(records.extents) == 2


def test_changes_while_a_write_is_under_way_are_not_lost() -> None:
    extents, records = loaded(), Records()
    extents.add(key(number) for number in range(64))
    ops = extents.plan(100)
    extents.remove([key(0)])
    extents.add([key(0)])
    extents.remove([key(number) for number in range(1, 64)])
    records.apply(ops)
    extents.commit(ops)
    extents.check()
    write(extents, records, everything=True)
    assert records.keys == [key(0)]


def test_an_emptied_etcd_gets_everything_again() -> None:
    extents, records = loaded(), Records()
    keys = [key(number) for number in range(200)]
    extents.add(keys)
    write(extents, records, everything=True)
    extents.remove(keys[:10])
    extents.forget_records()
    emptied = Records()
    write(extents, emptied, everything=True)
    assert emptied.keys == keys[10:]


_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 400), st.integers(1, 150)),
        st.tuples(st.just("remove"), st.integers(0, 400), st.integers(1, 150)),
        st.tuples(
            st.sampled_from(["write", "idle", "all", "lost", "failed", "restart", "reload", "emptied"])
        ),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(_ACTIONS)
def test_records_say_in_the_end_what_is_held(actions: list[tuple[object, ...]]) -> None:
    """`lost`: etcd did it and the answer was lost. `failed`: etcd did not do it."""
    extents, records, held = loaded(), Records(), set[bytes]()
    safe = set[bytes]()  # recorded, and not removed since: such a page may move, but never be missing
    for action in actions:
        name = action[0]
        if name in ("add", "remove"):
            start, count = action[1:]
            assert isinstance(start, int)
            assert isinstance(count, int)
            keys = [key(number) for number in range(start, start + count)]
            if name == "add":
                extents.add(keys)
                held.update(keys)
            else:
                extents.remove(keys)
                held.difference_update(keys)
                safe.difference_update(keys)
        elif name in ("lost", "failed"):
            ops = extents.plan(3, everything=True)
            if name == "lost":
                records.apply(ops)
        elif name == "restart":
            extents = loaded(records, sorted(held))
        elif name == "reload":
            extents.begin_load()
            extents.load(sorted(records.extents.items())[:2])  # and then it breaks off
            extents.check()
            extents.begin_load()
            extents.load(sorted(records.extents.items()))
            while not extents.finish_load(100):
                pass
        elif name == "emptied":
            records.extents.clear()
            safe.clear()
            extents.forget_records()
        else:
            while ops := extents.plan(2, everything=name == "all", idle=name == "idle"):
                records.apply(ops)
                extents.commit(ops)
                safe.update(key for op in ops if isinstance(op, ExtentPut) for key in op.keys)
                assert safe <= set(records.keys), "a page that was recorded and is held was lost"
        extents.check()
        assert len(extents) == len(held)
    write(extents, records, everything=True)
    assert set(records.keys) == held
    assert len(records.keys) == len(held)
