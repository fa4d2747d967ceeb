from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.cache.host_tier import HostTier
from jkv.cache.load import L2Page
from jkv.cache.pages import PageInfo
from tests.cache.tiers import content, prompt


def add(host: HostTier, info: PageInfo) -> L2Page | None:
    return host.add(info, content(info))


def test_pages_are_found_by_all_of_their_identity() -> None:
    host = HostTier(4, keep=True)
    (info,) = prompt(1, 1)
    page = add(host, info)
    assert page is not None
    assert host.find(info) is page
    assert host.find(PageInfo(info.key, info.parent, info.root, b"other tokens")) is None
    assert add(host, info) is None, "it is there already"
    assert host.find(info) is page


def test_the_oldest_leaf_goes_and_never_a_held_page() -> None:
    host = HostTier(4, keep=True)
    first, second = prompt(1, 2), prompt(2, 2)
    pages = [add(host, info) for info in (*first, *second)]
    held = pages[1]
    assert held is not None
    host.hold(held)
    add(host, prompt(3, 1)[0])
    assert [host.find(i) is not None for i in (*first, *second)] == [True, True, True, False]
    host.release(held)
    add(host, prompt(4, 1)[0])
    assert host.find(first[1]) is None


def test_no_room_where_all_are_held() -> None:
    host = HostTier(2, keep=True)
    pages = [add(host, prompt(family, 1)[0]) for family in range(2)]
    for page in pages:
        assert page is not None
        host.hold(page)
    assert add(host, prompt(9, 1)[0]) is None
    assert host.held == 2


def test_an_evicted_page_lets_go_of_its_memory() -> None:
    host = HostTier(1, keep=True)
    page = add(host, prompt(1, 1)[0])
    assert page is not None
    host.dirty[page.info.key] = page
    add(host, prompt(2, 1)[0])
    assert (page.payload, page.failed) == (None, True)
    assert not host.dirty


def test_staged_pages_go_with_their_last_holder() -> None:
    host = HostTier(2, keep=False)
    (info,) = prompt(1, 1)
    page = add(host, info)
    assert page is not None
    host.hold(page)
    host.hold(page)
    host.release(page)
    assert host.find(info) is page
    host.release(page)
    assert not host.pages()
    assert host.held == 0


def test_a_read_that_failed_is_not_found_and_goes_with_its_last_holder() -> None:
    host = HostTier(2, keep=True)
    (info,) = prompt(1, 1)
    page = host.add(info, None)
    assert page is not None
    host.hold(page)
    assert host.find(info) is page, "others can wait for it"
    host.arrived(page, None)
    assert host.find(info) is None
    host.release(page)
    assert info.key not in host.tree


@settings(deadline=None, max_examples=150)
@given(
    st.integers(0, 6),
    st.booleans(),
    st.lists(
        st.tuples(st.sampled_from(["add", "read", "hold", "release", "drop", "touch"]), st.integers(0, 30))
    ),
)
def test_the_bound_is_hard_and_held_pages_stay(
    capacity: int, keep: bool, actions: list[tuple[str, int]]
) -> None:
    host = HostTier(capacity, keep=keep)
    infos = [info for family in range(6) for info in prompt(family, 5)]
    holds: list[L2Page] = []
    for action, number in actions:
        info = infos[number % len(infos)]
        page = host.find(info)
        if action in ("add", "read"):
            page = host.add(info, content(info) if action == "add" else None)
            if page is not None and (action == "read" or not keep):
                host.hold(page)
                holds.append(page)
        elif action == "hold" and page is not None:
            host.hold(page)
            holds.append(page)
        elif action == "release" and holds:
            host.release(holds.pop(number % len(holds)))
        elif action == "drop" and page is not None and not page.holds:
            host.drop(page)
        else:
            host.touch([info.key])
        host.tree.check()
        assert len(host.tree) <= capacity
        assert host.held == len(set(map(id, holds)))
        assert all(host.tree.get(p.info.key) is p for p in holds), "a held page was evicted"
    for page in holds:
        host.release(page)
    assert host.held == 0
    assert all(p.payload is not None for p in host.pages())
    assert keep or not host.pages()
