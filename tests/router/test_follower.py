"""The stream of one engine's events: what reaches the index, and when a snapshot is asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.api import jkv_pb2 as pb
from jkv.cache.pages import Tier
from jkv.router.engines import Engine, SelfTest
from jkv.router.follow import Follower, GapError, RefusedError
from tests.router.doubles import Double
from tests.router.rig import Rig, cluster, prompt, rig_for, until


class Pages:
    """What an index would have."""

    def __init__(self) -> None:
        self.held: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}

    def update(self, tier: Tier, added: bytes, removed: bytes) -> None:
        self.held[tier] -= _split(removed)
        self.held[tier] |= _split(added)

    def clear(self, tiers: tuple[Tier, ...]) -> None:
        for tier in tiers:
            self.held[tier] = set()


def _split(keys: bytes) -> set[bytes]:
    return {keys[start : start + 16] for start in range(0, len(keys), 16)}


def _key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def _event(
    number: int,
    *,
    added: tuple[int, ...] = (),
    removed: tuple[int, ...] = (),
    tier: str = "l1",
    incarnation: str = "first",
    **fields: Any,
) -> pb.WatchEvent:
    change = pb.PageChange(tier=tier, added=b"".join(map(_key, added)), removed=b"".join(map(_key, removed)))
    changes = [change] if added or removed else []
    return pb.WatchEvent(incarnation=incarnation, number=number, changes=changes, **fields)


class Followed:
    """A follower without a stream."""

    def __init__(self, refusal: str = "") -> None:
        self.pages, self.joined = Pages(), 0
        self.engine = Engine(address="127.0.0.1:1", name="one", silence=1)
        self.follower = Follower(
            self.engine, self.pages, described=lambda description: refusal, joined=self._join
        )

    def _join(self) -> None:
        self.joined += 1

    def take(self, *events: pb.WatchEvent) -> None:
        for event in events:
            self.follower.take(event)

    def held(self, tier: Tier = Tier.L1) -> set[int]:
        return {int.from_bytes(key, "little") for key in self.pages.held[tier]}


def _followed(test: Any) -> None:
    async def run() -> None:
        followed = Followed()
        try:
            test(followed)
        finally:
            await followed.engine.close()

    asyncio.run(run())


def test_a_snapshot_in_parts_counts_once_it_is_whole() -> None:
    def check(one: Followed) -> None:
        one.take(
            _event(7, added=(1, 2), reset=True, partial=True), _event(7, added=(3,), tier="l3", partial=True)
        )
        assert not one.engine.synced
        one.take(_event(7, added=(4,)))
        assert (one.engine.synced, one.engine.number, one.joined) == (True, 7, 1)
        assert (one.held(), one.held(Tier.L3)) == ({1, 2, 4}, {3})

    _followed(check)


def test_changes_follow_each_other_also_in_parts_and_events_without_changes_repeat_the_number() -> None:
    def check(one: Followed) -> None:
        one.take(_event(1, added=(1,), reset=True), _event(2, added=(2,), removed=(1,)), _event(2))
        one.take(
            _event(3, added=(3,), partial=True), _event(3, removed=(2,), partial=True), _event(3, added=(5,))
        )
        assert (one.held(), one.engine.number) == ({3, 5}, 3)
        one.take(_event(4, added=(6,)))
        assert one.held() == {3, 5, 6}

    _followed(check)


@pytest.mark.parametrize(
    "event",
    [
        _event(7, added=(1,)),  # lost: 6
        _event(5, added=(1,)),  # again, or late
        _event(4, added=(1,)),
        _event(6),  # an event without changes from after a lost one
        _event(6, added=(1,), incarnation="second"),
    ],
    ids=["lost", "again", "late", "silent", "other"],
)
def test_what_does_not_follow_is_a_gap(event: pb.WatchEvent) -> None:
    def check(one: Followed) -> None:
        one.take(_event(5, added=(9,), reset=True))
        with pytest.raises(GapError):
            one.take(event)
        assert one.held() == {9}

    _followed(check)


def test_a_part_that_is_lost_is_a_gap() -> None:
    def check(one: Followed) -> None:
        one.take(_event(5, added=(9,), reset=True), _event(6, added=(1,), partial=True))
        with pytest.raises(GapError):
            one.take(_event(7, added=(2,)))

    _followed(check)


def test_a_snapshot_of_a_new_process_replaces_all_and_joins_again() -> None:
    def check(one: Followed) -> None:
        one.take(_event(5, added=(1,), reset=True))
        one.take(_event(5, added=(2,), reset=True))
        assert (one.held(), one.joined) == ({2}, 1)
        one.engine.self_test = SelfTest(verdict="passed")
        one.take(_event(0, added=(3,), reset=True, incarnation="second"))
        assert (one.held(), one.joined, one.engine.self_test) == ({3}, 2, SelfTest())

    _followed(check)


def test_an_engine_that_does_not_fit_is_refused() -> None:
    async def run() -> None:
        one = Followed(refusal="another page size")
        with pytest.raises(RefusedError, match="another page size"):
            one.follower.take(_event(1, reset=True), first=True)
        assert (one.engine.synced, one.engine.refused) == (False, "another page size")
        await one.engine.close()

    asyncio.run(run())


_NUMBERS = st.sets(st.integers(0, 9))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["l1", "l2", "l3"]), st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9))
        ),
        max_size=20,
    ),
    st.data(),
)
def test_whatever_is_lost_repeated_or_swapped_the_view_is_right_or_a_gap_is_seen(
    changes: list[tuple[str, set[int], set[int]]], data: st.DataObject
) -> None:
    truth: dict[int, dict[str, set[int]]] = {0: {tier: set() for tier in ("l1", "l2", "l3")}}
    events = [_event(0, reset=True)]
    for number, (tier, added, removed) in enumerate(changes, start=1):
        added, removed = added | {10}, removed - added
        truth[number] = {**truth[number - 1], tier: (truth[number - 1][tier] - removed) | added}
        events.append(_event(number, added=tuple(added), removed=tuple(removed), tier=tier))
    order = (
        data.draw(st.lists(st.sampled_from(range(1, len(events))), max_size=25)) if len(events) > 1 else []
    )

    def check(one: Followed) -> None:
        one.take(events[0])
        try:
            for position in order:
                one.take(events[position])
        except GapError:
            pass
        assert {tier.value: one.held(tier) for tier in Tier} == truth[one.engine.number]

    _followed(check)


async def _agree(rig: Rig, *engines: Double) -> None:
    """Wait until the router believes of each engine what it holds."""
    for engine in engines:
        request = pb.RouterDigestRequest(engine=engine.description.id)

        async def same(engine: Double = engine, request: Any = request) -> bool:
            believed = await rig.service.Digest(request)
            held = await engine.Digest(pb.DigestRequest(), None)
            tiers = [(one.tier, one.pages, one.checksum) for one in believed.tiers]
            return (believed.incarnation, tiers) == (
                held.incarnation,
                [(one.tier, one.pages, one.checksum) for one in held.tiers],
            )

        for _ in range(500):
            if await same():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{engine.description.id}: the router believes something else")


@pytest.mark.parametrize("fault", ["lost", "late", "again", "swapped"])
def test_the_index_is_right_again_after_changes_are_lost_late_repeated_or_swapped(fault: str) -> None:
    async def run() -> None:
        async with cluster("one", "two") as (rig, (one, two)):
            keys = [_key(number + 1) for number in range(40)]
            one.publish(one.change("l1", keys[:10]))
            await _agree(rig, one, two)
            a, b, c = (
                one.change("l1", keys[10:20]),
                one.change("l2", keys[:5]),
                one.change("l1", (), keys[:3]),
            )
            order = {"lost": (a, c), "late": (b, c, a), "again": (a, a, b, c), "swapped": (b, a, c)}[fault]
            one.publish(*order)
            await _agree(rig, one, two)
            assert (await rig.status())["one"].state == "serving"
            one.publish(one.change("l2", keys[20:]))
            await _agree(rig, one, two)

    asyncio.run(run())


def test_death_forgets_the_memory_of_a_process_and_its_successor_starts_anew() -> None:
    async def run() -> None:
        async with cluster("one", "two") as (rig, (one, two)):
            for engine in (one, two):
                engine.publish(engine.change("l1", [_key(1), _key(2)]))
            await _agree(rig, one, two)
            await one.kill()
            await until(lambda: rig.router._view.pages_by_tier(rig.router._fleet.engines[0])["l1"] == 0)
            assert (await rig.status())["one"].state == "connecting"
            assert (await rig.generate(prompt())).engines() == ["two"]
            await one.restart()
            await until(lambda: rig.router._fleet.engines[0].self_test.verdict == "passed")
            await _agree(rig, one, two)
            assert (await rig.status())["one"].state == "serving"

    asyncio.run(run())


def test_a_connection_that_breaks_for_a_moment_goes_on_where_it_was() -> None:
    async def run() -> None:
        async with cluster("one") as (rig, (one,)):
            one.publish(one.change("l1", [_key(1)]))
            await _agree(rig, one)
            tested = rig.router._fleet.engines[0].self_test
            await one.kill()
            one._followers = []
            await one.start(int(one.address.rpartition(":")[2]))  # the same incarnation
            one.publish(one.change("l1", [_key(2)]))
            await _agree(rig, one)
            assert rig.router._fleet.engines[0].self_test is tested
            assert tested.verdict == "passed"

    asyncio.run(run())


def test_the_self_test_fails_where_the_index_and_the_cache_disagree() -> None:
    async def run() -> None:
        liar, deaf = Double("liar"), Double("deaf")
        liar._match = lambda request: type(Double._match(liar, request))(l1=8)  # type: ignore[method-assign]
        for engine in (liar, deaf):
            await engine.start()
        deaf.failing = True
        async with rig_for([liar, deaf]) as rig:
            status = await rig.status()
            assert status["liar"].self_test == (
                "failed: the index has 16 tokens of a prompt, of which 8 are cached"
            )
            assert status["deaf"].self_test.startswith("failed: INTERNAL")
        for engine in (liar, deaf):
            await engine.kill()

    asyncio.run(run())


def test_engines_of_one_model_must_agree_on_their_pages() -> None:
    async def run() -> None:
        good, bad = Double("good"), Double("bad", root=b"x" * 16)
        other = Double("other", model="another", root=b"x" * 16)
        for engine in (good, bad, other):
            await engine.start()
        async with rig_for([good, other]) as rig:
            members = {one.address: one.address for one in (good, bad, other)}
            rig.router._fleet.set_members(members)
            await until(lambda: any(engine.refused for engine in rig.router._fleet.engines))
            answer = await rig.service.Status(pb.RouterStatusRequest())
            assert sorted(engine.id for engine in answer.engines) == ["good", "other"]
            (refused,) = answer.refused
            assert refused.address == bad.address
            assert "model root 7878" in refused.reason
            assert "good" in refused.reason
        for engine in (good, bad, other):
            await engine.kill()

    asyncio.run(run())
