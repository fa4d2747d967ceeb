from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jkv.cache.page_tree import PageTree

ROOT = b"root"


def chain(tree: PageTree[str], *names: str, parent: str = "root") -> None:
    for name in names:
        assert tree.add(name.encode(), parent.encode(), name) is not None
        parent = name


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def evicted(tree: PageTree[str], count: int) -> list[str]:
    return [value for _, value in tree.evict(count)]


def test_leaves_go_before_their_parents() -> None:
    tree = PageTree[str](9)
    chain(tree, "a", "b", "c")
    assert evicted(tree, 9) == ["c", "b", "a"]
    assert tree.evictions == 3
    assert len(tree) == 0


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree = PageTree[str](9)
    chain(tree, "a", "b")
    chain(tree, "x", "y")
    tree.touch(keys("a", "b", "absent"))
    assert evicted(tree, 2) == ["y", "x"]


def test_asking_for_a_page_is_no_use_of_it() -> None:
    tree = PageTree[str](9)
    chain(tree, "a")
    chain(tree, "b")
    assert tree.get(b"a") == "a"
    assert tree.get(b"absent") is None
    assert evicted(tree, 1) == ["a"]


def test_a_full_tree_makes_room_but_not_from_above_the_new_page() -> None:
    tree = PageTree[str](2)
    chain(tree, "a", "b")
    assert tree.add(b"c", b"b", "c") is None
    assert tree.add(b"x", ROOT, "x") == [(b"b", "b")]
    assert tree.add(b"b", b"a", "b") == [(b"x", "x")]
    tree.check()


def test_without_capacity_nothing_is_added() -> None:
    tree = PageTree[str](0)
    assert tree.add(b"a", ROOT, "a") is None
    tree.check()


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        PageTree[str](-1)


def test_a_lowered_capacity_is_met_by_evicting_and_by_the_next_page() -> None:
    tree = PageTree[str](4)
    chain(tree, "a", "b", "c", "d")
    tree.capacity = 2
    assert tree.add(b"e", b"d", "e") is None
    assert tree.add(b"x", ROOT, "x") == [(b"d", "d"), (b"c", "c"), (b"b", "b")]
    assert len(tree) == 2


def test_a_page_in_use_and_those_above_it_stay() -> None:
    tree = PageTree[str](4)
    chain(tree, "a", "b", "c")
    tree.hold(b"b")
    tree.hold(b"b")
    tree.release(b"b")
    assert evicted(tree, 9) == ["c"]
    tree.release(b"b")
    assert evicted(tree, 9) == ["b", "a"]


def test_releasing_too_often_is_caught() -> None:
    tree = PageTree[str](1)
    chain(tree, "a")
    tree.pin(b"a", math.inf)
    with pytest.raises(AssertionError, match="released more often"):
        tree.release(b"a")


def test_removing_a_page_in_use_is_caught() -> None:
    tree = PageTree[str](1)
    chain(tree, "a")
    tree.hold(b"a")
    with pytest.raises(AssertionError, match="in use"):
        tree.remove(b"a")


def test_pins_hold_until_they_are_due() -> None:
    tree = PageTree[str](4)
    chain(tree, "a", "b")
    chain(tree, "x")
    tree.pin(b"b", 10.0)
    tree.pin(b"x", math.inf)
    tree.pin(b"b", 20.0)
    tree.pin(b"b", 5.0)  # does not shorten it
    assert tree.pinned == 2
    assert tree.expire(19.9) == 0
    assert evicted(tree, 9) == []
    assert tree.expire(20.0) == 1
    assert evicted(tree, 9) == ["b", "a"]
    assert tree.unpin(b"x")
    assert not tree.unpin(b"x")
    assert evicted(tree, 9) == ["x"]


def test_pinning_again_and_again_takes_no_memory() -> None:
    tree = PageTree[str](1)
    chain(tree, "a")
    for i in range(1000):
        tree.pin(b"a", 1e6 + i)
        if i % 2:
            tree.unpin(b"a")
    assert len(tree._pins_due) < 200  # no public way to see a leak


def test_pages_that_leave_by_removal_take_no_memory() -> None:
    tree = PageTree[str](1)
    for _ in range(1000):
        chain(tree, "a")
        assert tree.remove(b"a") == "a"
    assert len(tree._candidates) < 200
    assert evicted(tree, 1) == []


def test_an_orphan_is_found_by_its_parent() -> None:
    tree = PageTree[str](9)
    chain(tree, "c", parent="b")
    chain(tree, "a")
    chain(tree, "b", parent="a")
    assert evicted(tree, 1) == ["c"]


def test_a_page_can_leave_from_between_and_come_back() -> None:
    tree = PageTree[str](9)
    chain(tree, "a", "b", "c")
    tree.hold(b"c")
    assert tree.remove(b"b") == "b"
    assert evicted(tree, 9) == ["a"]
    chain(tree, "a")
    chain(tree, "b", parent="a")
    assert evicted(tree, 9) == []
    tree.check()


def test_pages_above_themselves_are_refused() -> None:
    tree = PageTree[str](9)
    chain(tree, "a", parent="b")
    for parent in (b"a", b"b"):
        with pytest.raises(ValueError, match="above itself"):
            tree.add(b"b", parent, "b")
    tree.check()


def test_a_saved_order_can_be_restored() -> None:
    tree, other = PageTree[str](9), PageTree[str](9)
    chain(tree, "a", "b", "c")
    chain(tree, "x", "y")
    tree.touch(keys("a", "b"))
    parents = {"a": "root", "b": "a", "c": "b", "x": "root", "y": "x"}
    for key in tree.keys_oldest_first():
        chain(other, key.decode(), parent=parents[key.decode()])
    assert evicted(other, 9) == evicted(tree, 9)


def test_a_prefix_of_a_million_tokens() -> None:
    tree = PageTree[int](16_384)
    parent = ROOT
    pages = [i.to_bytes(16, "little") for i in range(16_384)]
    for i, key in enumerate(pages):
        assert tree.add(key, parent, i) == []
        parent = key
    tree.hold(pages[-1])
    assert tree.evict(1) == []
    tree.release(pages[-1])
    assert [value for _, value in tree.evict(16_384)] == list(range(16_383, -1, -1))


@dataclass
class Page:
    parent: bytes
    stamp: int
    users: int = 0
    pin: float = 0.0


class Model:
    """The same in the plainest way: every question is answered by looking at all pages."""

    def __init__(self) -> None:
        self.pages: dict[bytes, Page] = {}
        self.clock = 0

    def now(self) -> int:
        self.clock += 1
        return self.clock

    def victim(self, spare: bytes) -> bytes | None:
        parents = {p.parent for p in self.pages.values()}
        leaves = [k for k, p in self.pages.items() if k not in parents and not p.users and not p.pin]
        return min((k for k in leaves if k != spare), key=lambda k: self.pages[k].stamp, default=None)

    def evict(self, count: int, spare: bytes = b"") -> list[bytes]:
        gone: list[bytes] = []
        while len(gone) < count and (key := self.victim(spare)) is not None:
            del self.pages[key]
            gone.append(key)
        return gone

    def add(self, key: bytes, parent: bytes, capacity: int) -> list[bytes] | None:
        before = dict(self.pages)
        need = len(self.pages) + 1 - capacity
        gone = self.evict(need, spare=parent)
        if len(gone) < need:
            self.pages = before
            return None
        self.pages[key] = Page(parent, self.now())
        return gone


# A fixed forest of prefixes over two symbols, so that pages come, go and come back in any order.
PREFIXES = [format(i, f"0{n}b").encode() for n in range(1, 5) for i in range(2**n)]


class TreeMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(0, 12))
    def start(self, capacity: int) -> None:
        self.tree, self.model = PageTree[bytes](capacity), Model()
        self.now = 1.0

    def pick(self, data: st.DataObject, wanted: Callable[[Page], bool] = lambda _: True) -> bytes | None:
        matching = sorted(k for k, p in self.model.pages.items() if wanted(p))
        return data.draw(st.sampled_from(matching)) if matching else None

    @rule(key=st.sampled_from(PREFIXES))
    def add(self, key: bytes) -> None:
        if key in self.model.pages:
            return
        gone = self.tree.add(key, key[:-1] or ROOT, b"page " + key)
        wanted = self.model.add(key, key[:-1] or ROOT, self.tree.capacity)
        assert gone == (None if wanted is None else [(k, b"page " + k) for k in wanted])

    @rule(key=st.sampled_from(PREFIXES))
    def touch(self, key: bytes) -> None:
        prefix = [key[: i + 1] for i in range(len(key))]
        self.tree.touch(prefix)
        for k in reversed(prefix):
            if k in self.model.pages:
                self.model.pages[k].stamp = self.model.now()

    @rule(count=st.integers(-1, 4))
    def evict(self, count: int) -> None:
        assert [k for k, _ in self.tree.evict(count)] == self.model.evict(count)

    @rule(capacity=st.integers(0, 12))
    def resize(self, capacity: int) -> None:
        self.tree.capacity = capacity

    @precondition(lambda self: self.model.pages)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        if key := self.pick(data):
            self.tree.hold(key)
            self.model.pages[key].users += 1

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if key := self.pick(data, lambda p: p.users > 0):
            self.tree.release(key)
            self.model.pages[key].users -= 1

    @precondition(lambda self: self.model.pages)
    @rule(data=st.data(), after=st.sampled_from([0.5, 2.0, 9.0, math.inf]))
    def pin(self, data: st.DataObject, after: float) -> None:
        if key := self.pick(data):
            self.tree.pin(key, self.now + after)
            page = self.model.pages[key]
            page.pin = max(page.pin, self.now + after)

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if key := self.pick(data):
            assert self.tree.unpin(key) == bool(self.model.pages[key].pin)
            self.model.pages[key].pin = 0.0

    @rule(seconds=st.floats(0, 4))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        due = [p for p in self.model.pages.values() if 0 < p.pin <= self.now]
        assert self.tree.expire(self.now) == len(due)
        for page in due:
            page.pin = 0.0

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if key := self.pick(data, lambda p: not p.users):
            assert self.tree.remove(key) == b"page " + key
            del self.model.pages[key]

    @invariant()
    def same(self) -> None:
        self.tree.check()
        model = self.model
        assert list(self.tree.keys_oldest_first()) == sorted(model.pages, key=lambda k: model.pages[k].stamp)
        assert self.tree.pinned == sum(p.pin > 0 for p in model.pages.values())
        assert all((k in self.tree) == (k in model.pages) for k in PREFIXES)


TreeMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTreeMachine = TreeMachine.TestCase


@given(st.permutations(PREFIXES[:14]))
def test_pages_may_come_in_any_order(order: list[bytes]) -> None:
    tree = PageTree[None](14)
    for key in order:
        assert tree.add(key, key[:-1] or ROOT, None) == []
    tree.check()
    gone = [key for key, _ in tree.evict(14)]
    assert set(gone) == set(order)
    assert all(gone.index(key) < gone.index(key[:-1]) for key in order if key[:-1] in gone)
