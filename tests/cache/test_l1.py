from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jkv.cache.keys import pack_tokens, page_key
from jkv.cache.l1 import L1Pool
from jkv.cache.pages import PageInfo

ROOT = b"root"
PAGE = 2


def info(parent: bytes, tokens: tuple[int, int]) -> PageInfo:
    return PageInfo(page_key(parent, tokens), parent, ROOT, pack_tokens(tokens))


def fill(pool: L1Pool, *pages: tuple[int, int], parent: bytes = ROOT) -> list[int]:
    """Computes and publishes a chain of pages for one user."""
    used: list[int] = []
    for tokens in pages:
        got = pool.allocate(1)
        assert got is not None
        used.append(pool.publish(got[0], info(parent, tokens), 2 * PAGE))
        parent = page_key(parent, tokens)
    return used


def match(pool: L1Pool, *pages: tuple[int, int]) -> list[int]:
    found, parent = [], ROOT
    for tokens in pages:
        page = pool.find(info(parent, tokens))
        if page is None:
            break
        found.append(page)
        parent = page_key(parent, tokens)
    return found


def test_a_published_prefix_is_found_after_its_user_left() -> None:
    pool = L1Pool(4, PAGE)
    used = fill(pool, (1, 2), (3, 4))
    pool.release(used)
    assert match(pool, (1, 2), (3, 4), (5, 6)) == used
    assert pool.counts().cached == 2
    pool.check()


def test_leaves_go_before_their_parents() -> None:
    pool = L1Pool(3, PAGE)
    used = fill(pool, (1, 2), (3, 4), (5, 6))
    pool.release(used)
    pool.allocate(1)
    assert match(pool, (1, 2), (3, 4), (5, 6)) == used[:2]
    pool.check()


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = L1Pool(2, PAGE)
    old, new = fill(pool, (1, 1)), fill(pool, (2, 2))
    pool.release(old)
    pool.release(new)
    pool.acquire(old[0])
    pool.release(old)
    pool.allocate(1)
    assert match(pool, (1, 1)) == old
    assert match(pool, (2, 2)) == []
    assert pool.evictions == 1


def test_what_is_evicted_is_offered_with_its_longest_prompt_and_whether_it_was_used() -> None:
    pool, offers = L1Pool(3, PAGE), []
    pool.on_evict = offers.append
    first, second, third = fill(pool, (1, 2), (3, 4), (5, 6))
    pool.note_use(info(ROOT, (1, 2)), 7)
    pool.note_use(info(ROOT, (1, 2)), 5)
    pool.note_use(info(ROOT, (9, 9)), 100)  # it is not here
    pool.release([first, second, third])
    pool.release(fill(pool, (1, 2)))  # computed once more, and merged
    pool.allocate(3)
    assert [(o.page, o.prompt_tokens, o.used) for o in offers] == [
        (third, 2 * PAGE, False),
        (second, 2 * PAGE, False),
        (first, 7, True),
    ]
    pool.reset()
    pool.release(fill(pool, (1, 2)))
    (again,) = pool.idle()
    assert (again.prompt_tokens, again.used) == (2 * PAGE, False), "what was known of it is forgotten"


def test_a_page_in_use_is_never_evicted() -> None:
    pool = L1Pool(2, PAGE)
    used = fill(pool, (1, 2))
    assert pool.allocate(2) is None
    assert pool.allocate(1) is not None
    assert match(pool, (1, 2)) == used
    pool.check()


def test_equal_pages_keep_one_copy() -> None:
    pool = L1Pool(4, PAGE)
    first, second = fill(pool, (1, 2)), fill(pool, (1, 2))
    assert first == second
    assert pool.counts().in_use == 1
    pool.release(first)
    assert pool.counts().in_use == 1
    pool.release(second)
    assert pool.counts().cached == 1
    pool.check()


def test_a_colliding_key_is_no_hit_and_stays_private() -> None:
    pool = L1Pool(4, PAGE)
    (page,) = fill(pool, (1, 2))
    mine = info(ROOT, (1, 2))
    other = dataclasses.replace(mine, tokens=pack_tokens((9, 9)))
    assert pool.find(other) is None
    got = pool.allocate(1)
    assert got is not None
    assert pool.publish(got[0], other, PAGE) == got[0]
    assert pool.find(mine) == page
    pool.release(got)
    pool.release([page])
    assert pool.counts().cached == 1
    pool.check()


def test_releasing_twice_is_caught() -> None:
    pool = L1Pool(1, PAGE)
    pages = pool.allocate(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(pages)


@given(st.integers(-3, 0))
def test_an_empty_pool_is_refused(total: int) -> None:
    with pytest.raises(ValueError, match="needs pages"):
        L1Pool(total, PAGE)


class PoolMachine(RuleBasedStateMachine):
    """Users come with random prefixes over two symbols, share what they find, fill the rest, and leave."""

    @initialize(total=st.integers(1, 9))
    def start(self, total: int) -> None:
        self.pool = L1Pool(total, PAGE)
        self.users: list[tuple[list[int], list[tuple[int, int]]]] = []
        self.content: dict[int, tuple[tuple[int, int], ...]] = {}

    @rule(prefix=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=5))
    def come(self, prefix: list[tuple[int, int]]) -> None:
        used = match(self.pool, *prefix)
        for depth, page in enumerate(used):
            assert self.content[page] == tuple(prefix[: depth + 1]), "a hit on another prefix's page"
            self.pool.acquire(page)
        parent = ROOT
        for tokens in prefix[: len(used)]:
            parent = page_key(parent, tokens)
        for depth in range(len(used), len(prefix)):
            got = self.pool.allocate(1)
            if got is None:
                break
            in_use = {p for pages, _ in self.users for p in pages} | set(used)
            assert got[0] not in in_use, "a page in use was handed out"
            used.append(self.pool.publish(got[0], info(parent, prefix[depth]), PAGE))
            self.content[used[-1]] = tuple(prefix[: depth + 1])
            parent = page_key(parent, prefix[depth])
        self.users.append((used, prefix))

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        pages, _ = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        self.pool.release(pages)

    @invariant()
    def sound(self) -> None:
        self.pool.check()
        used = {p for pages, _ in self.users for p in pages}
        assert self.pool.counts().in_use == len(used)
        for pages, prefix in self.users:
            assert match(self.pool, *prefix)[: len(pages)] == pages, "a prefix in use cannot be found"


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase
