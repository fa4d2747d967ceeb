from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.cache.disk_tier import DiskTier
from jkv.cache.l3.listing import Listing, StalePage
from jkv.cache.l3.names import StoredPage, page_of
from jkv.cache.l3.reasons import Reason
from jkv.cache.l3.store import WriteOutcome
from jkv.cache.pages import PageInfo
from tests.cache.tiers import MODEL, OWNER, ByteCodec, FakeStore, content, prompt


class Disk:
    """A disk tier whose store's answers are delivered at once."""

    def __init__(
        self,
        capacity: int,
        *,
        own: list[StoredPage] | None = None,
        foreign: list[StoredPage] | None = None,
        stale: list[StalePage] | None = None,
    ) -> None:
        self.store = FakeStore()
        self.calls: list[Callable[[], None]] = []
        listing = Listing(own=own or [], foreign=foreign or [], stale=stale or [])
        self.tier = DiskTier(self.store, listing, capacity, ByteCodec(), self.calls.append)

    def write(self, info: PageInfo, reason: Reason | None = None) -> bool:
        """Whether the page was published; what goes for it is deleted before."""
        if not self.tier.reserve(info):
            self.answer()
            return False
        outcomes: list[WriteOutcome] = []
        self.store.write(info, lambda: content(info), outcomes.append)
        self.answer()
        self.store.finish(self.store.pending("write")[0], reason)
        return self.tier.written(info, outcomes[0])

    def answer(self, reason: Reason | None = None) -> None:
        for operation in self.store.pending("delete"):
            self.store.finish(operation, reason)
        while self.calls:
            self.calls.pop(0)()


def stored(infos: list[PageInfo], owner: str = OWNER) -> list[StoredPage]:
    return [page_of(owner, MODEL, info) for info in infos]


def test_a_page_is_found_once_it_is_published() -> None:
    d = Disk(4)
    (info,) = prompt(1, 1)
    assert d.tier.reserve(info)
    assert d.tier.has(info)
    assert d.tier.find(info) is None
    assert not d.tier.reserve(info), "it is being written"
    assert d.tier.written(info, WriteOutcome(page_of(OWNER, MODEL, info), None, 0.0, 1))
    assert d.tier.find(info) == page_of(OWNER, MODEL, info)


def test_pages_under_another_parent_or_salt_are_others() -> None:
    (info,) = prompt(1, 1)
    d = Disk(4, own=stored([info]))
    assert d.tier.find(info) is not None
    assert d.tier.find(PageInfo(info.key, bytes(16), info.root, info.tokens)) is None
    assert d.tier.find(PageInfo(info.key, info.parent, b"x" * 16, info.tokens)) is None


def test_leaves_go_before_their_parents_and_the_oldest_first() -> None:
    old, new = prompt(1, 2), prompt(2, 2)
    d = Disk(4)
    for info in (*old, *new):
        assert d.write(info)
    d.tier.touch([info.key for info in old])
    assert d.write(prompt(3, 1)[0])
    gone = [info for info in (*old, *new) if d.tier.find(info) is None]
    assert gone == [new[1]]
    assert len(d.store.objects) == 4


def test_more_pages_than_fit_are_deleted_at_the_start_the_oldest_first() -> None:
    pages = [info for family in range(6) for info in prompt(family, 1)]
    d = Disk(4, own=stored(pages))
    assert [d.tier.find(p) is not None for p in pages] == [False] * 2 + [True] * 4
    assert {o.page.key for o in d.store.pending("delete")} == {p.key for p in pages[:2]}


def test_pages_of_other_models_go_first() -> None:
    stale = [
        StalePage(StoredPage(OWNER, "ffffffff", bytes([i] * 16), bytes(16), bytes(4)), 2) for i in range(2)
    ]
    d = Disk(6, stale=stale)
    assert (d.tier.bytes, d.tier.capacity) == (4, 2)
    infos = prompt(1, 5)
    for info in infos[:2]:
        assert d.write(info)
    assert not d.store.pending("delete")
    assert d.write(infos[2])
    assert (d.tier.bytes, d.tier.capacity) == (5, 4)
    for info in infos[3:]:
        assert d.write(info)
    assert (d.tier.bytes, d.tier.capacity) == (5, 6)


def test_foreign_pages_are_read_and_never_deleted() -> None:
    infos = prompt(1, 3)
    d = Disk(4, foreign=stored(infos, "other"))
    assert d.tier.has(infos[0])
    assert not d.tier.remove(infos[0].key)
    page = d.tier.find(infos[0])
    assert page is not None
    assert page.owner == "other"
    d.tier.unreadable(page, Reason.CORRUPT)
    assert d.tier.find(infos[0]) is None
    assert not d.store.pending("delete")
    d.tier.set_foreign(stored(infos[2:], "other"))
    assert [d.tier.find(i) is not None for i in infos] == [False, False, True]


def test_a_page_evicted_while_it_is_read_is_no_error() -> None:
    d = Disk(1)
    (first,), (second,) = prompt(1, 1), prompt(2, 1)
    assert d.write(first)
    page = d.tier.find(first)
    assert page is not None
    assert d.write(second)
    d.tier.unreadable(page, Reason.MISSING)
    assert not d.tier.errors
    page = d.tier.find(second)
    assert page is not None
    d.tier.unreadable(page, Reason.MISSING)
    assert d.tier.errors == {"read_missing": 1}
    assert d.tier.find(second) is None


def test_own_and_foreign_copies_stand_in_for_each_other() -> None:
    (info,) = prompt(1, 1)
    d = Disk(4, own=stored([info]), foreign=stored([info], "other"))
    page = d.tier.find(info)
    assert page is not None
    assert page.owner == OWNER
    d.tier.unreadable(page, Reason.CORRUPT)
    d.answer()
    other = d.tier.find(info)
    assert other is not None
    assert other.owner == "other"


def test_what_cannot_be_deleted_takes_room_until_it_can() -> None:
    infos = [prompt(family, 1)[0] for family in range(4)]
    d = Disk(2)
    for info in infos[:2]:
        assert d.write(info)
    assert d.tier.remove(infos[0].key)
    d.answer(Reason.IO)
    assert (d.tier.bytes, d.tier.capacity, len(d.tier)) == (2, 1, 1)
    assert d.write(infos[2]), "the second attempt has freed its room"
    assert (d.tier.bytes, d.tier.capacity) == (1, 2)
    assert d.write(infos[3])
    assert len(d.store.objects) == 2


def test_a_page_written_over_one_that_could_not_be_deleted_counts_once() -> None:
    (info,) = prompt(1, 1)
    d = Disk(2)
    d.write(info)
    d.tier.remove(info.key)
    d.answer(Reason.IO)
    assert d.write(info)
    assert (d.tier.bytes, d.tier.capacity) == (1, 2)
    assert d.write(prompt(2, 1)[0])
    assert d.tier.find(info) is not None
    assert len(d.store.objects) == 2, "the page just written was deleted"


def test_a_store_that_deletes_nothing_does_not_grow() -> None:
    d = Disk(8)
    published = 0
    for family in range(200):
        (info,) = prompt(family, 1)
        if d.tier.reserve(info):
            outcomes: list[WriteOutcome] = []
            d.store.write(info, lambda info=info: content(info), outcomes.append)
            d.store.finish(d.store.pending("write")[0])
            published += d.tier.written(info, outcomes[0])
        d.answer(Reason.READ_ONLY)
    assert len(d.store.objects) <= 2 * 8
    d.answer()
    for family in range(200, 300):
        d.write(prompt(family, 1)[0])
    assert len(d.store.objects) == d.tier.bytes == 8, "it does not recover"


@pytest.mark.parametrize("reason", [Reason.IO, Reason.NO_SPACE, Reason.BUDGET])
def test_a_failed_write_gives_its_room_back(reason: Reason) -> None:
    d = Disk(2)
    (info,) = prompt(1, 1)
    assert not d.write(info, reason)
    assert not d.tier.has(info)
    assert d.tier.errors == {f"write_{reason.value}": 1}
    assert d.write(info)


def test_the_order_of_use_is_saved_and_restored() -> None:
    d = Disk(8)
    infos = [prompt(family, 1)[0] for family in range(4)]
    for info in infos:
        d.write(info)
    d.tier.touch([infos[0].key])
    d.tier.close()
    assert d.store.recency == [i.key for i in (*infos[1:], infos[0])]


def test_whoever_waits_for_deletions_hears_when_they_are_done() -> None:
    d = Disk(4)
    heard: list[bool] = []
    d.tier.when_deleted(lambda: heard.append(True))
    assert heard
    for info in prompt(1, 2):
        d.write(info)
    for info in prompt(1, 2):
        d.tier.remove(info.key)
    d.tier.when_deleted(lambda: heard.append(True))
    assert len(heard) == 1
    d.answer()
    assert len(heard) == 2


def test_whoever_waits_for_deletions_does_not_wait_for_later_ones() -> None:
    """On a busy engine there is always another one under way."""
    d = Disk(8)
    infos = prompt(1, 6)
    for info in infos:
        d.write(info)
    heard: list[str] = []
    leaves = reversed(infos)
    d.tier.remove(next(leaves).key)
    d.tier.remove(next(leaves).key)
    d.tier.when_deleted(lambda: heard.append("two"))
    for info in leaves:
        d.tier.remove(info.key)
        d.store.finish(d.store.pending("delete")[0])
        d.calls.pop(0)()
        assert d.tier._deleting
    assert heard == ["two"]


@settings(deadline=None, max_examples=150)
@given(
    capacity=st.integers(0, 8),
    pages=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6), st.booleans()), max_size=40),
)
def test_the_disk_never_holds_more_than_it_may(capacity: int, pages: list[tuple[int, int, bool]]) -> None:
    d = Disk(capacity)
    for family, length, fails in pages:
        for info in prompt(family, length):
            d.write(info, Reason.IO if fails else None)
            assert len(d.store.objects) <= capacity
            assert len(d.store.objects) == len(d.tier.own_pages()) == len(d.tier)
            d.tier.tree.check()
