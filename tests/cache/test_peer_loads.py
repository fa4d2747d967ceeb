"""Loads that bring pages of a peer, which answers when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from jkv.cache.load import Load, PageState
from jkv.cache.pages import PEER, PageInfo, Tier
from jkv.cache.peer_tier import PeerTier
from jkv.cache.peers import PeerHint
from tests.cache.tiers import Rig, content, prompt, rig

HINT = PeerHint(address="there", pages=4)


@dataclass
class Fetch:
    infos: Sequence[PageInfo]
    arrived: Callable[[Any], None]
    ended: Callable[[], None]
    cancelled: bool = False

    def answer(self, pages: int) -> None:
        for info in self.infos[:pages]:
            self.arrived(content(info))
        self.ended()


class FakePeers:
    """Stands for a PeerTier."""

    def __init__(self) -> None:
        self.fetches: list[Fetch] = []
        self.late: list[str] = []

    def note_late(self, address: str) -> None:
        self.late.append(address)

    def allows(self, address: str) -> bool:
        return address == HINT.address

    def fetch(
        self,
        address: str,
        infos: Sequence[PageInfo],
        arrived: Callable[[Any], None],
        ended: Callable[[], None],
    ) -> Callable[[], None]:
        fetch = Fetch(infos, arrived, ended)
        self.fetches.append(fetch)

        def cancel() -> None:
            fetch.cancelled = True

        return cancel


def with_peer(**options: Any) -> tuple[Rig, FakePeers]:
    r, peers = rig(**options), FakePeers()
    r.lower.peers = cast(PeerTier, peers)
    return r, peers


def begin(r: Rig, infos: Sequence[PageInfo]) -> Load:
    load = r.lower.begin(infos, peer=HINT)
    assert load is not None
    return load


def test_pages_come_from_l3_and_then_from_the_peer() -> None:
    infos = prompt(1, 4)
    r, peers = with_peer(own=infos[:1])
    load = begin(r, infos)
    (fetch,) = peers.fetches
    assert list(fetch.infos) == infos[1:]
    fetch.answer(3)
    r.settle()
    assert r.bring(load) == ([Tier.L3, PEER, PEER, PEER], PageState.ABSENT)
    r.lower.end(load)
    r.check_at_rest()


def test_who_joins_a_fetch_under_way_has_its_pages_from_the_peer_too() -> None:
    infos = prompt(1, 4)
    r, peers = with_peer()
    loads = [begin(r, infos), begin(r, infos)]
    (fetch,) = peers.fetches
    fetch.answer(4)
    for load in loads:
        assert r.bring(load)[0] == [PEER] * 4
        r.lower.end(load)
    r.check_at_rest()
    assert r.hit(infos) == [Tier.L2] * 4, "later ones have them from here"


def test_a_peer_that_gives_less_ends_the_load_there() -> None:
    infos = prompt(1, 4)
    r, peers = with_peer()
    load = begin(r, infos)
    assert r.bring(load) == ([], PageState.COMING)
    peers.fetches[0].answer(2)
    assert r.bring(load) == ([PEER, PEER], PageState.ABSENT)
    r.lower.end(load)
    r.check_at_rest()


def test_a_peer_that_hangs_is_told_of_by_the_load_that_gives_up() -> None:
    infos = prompt(1, 4)
    r, peers = with_peer(load_timeout_s=1.0)
    load = begin(r, infos)
    peers.fetches[0].arrived(content(infos[0]))
    assert r.bring(load) == ([PEER], PageState.COMING)
    r.clock.now += 1.1
    assert r.bring(load, 1) == ([], PageState.ABSENT)
    assert peers.late == [HINT.address]
    assert r.lower.reading.state == "closed", "the disk is blamed"
    r.lower.end(load)
    peers.fetches[0].ended()
    r.check_at_rest()


def test_a_load_that_ends_cancels_its_fetch_and_gives_back_its_room() -> None:
    infos = prompt(1, 4)
    r, peers = with_peer()
    load = begin(r, infos)
    r.lower.end(load)
    (fetch,) = peers.fetches
    assert fetch.cancelled
    fetch.answer(0)
    r.check_at_rest()


def test_a_fetch_goes_on_for_as_long_as_somebody_waits_for_a_page_of_it() -> None:
    infos = prompt(1, 4)
    r, peers = with_peer()
    whole, part = begin(r, infos), begin(r, infos[:2])
    r.lower.end(whole)
    (fetch,) = peers.fetches
    assert not fetch.cancelled
    fetch.arrived(content(infos[0]))
    assert r.bring(part)[0] == [PEER]
    r.lower.end(part)
    assert fetch.cancelled, "nobody waits for the other three"
    fetch.ended()
    r.check_at_rest()
