from __future__ import annotations

from typing import Any

import pytest

from jkv.cache.l1 import Offer
from jkv.cache.l3.reasons import Reason
from jkv.cache.pages import Tier
from jkv.errors import FailedPreconditionError
from tests.cache.tiers import content, prompt, rig


def test_full_pages_go_down_once() -> None:
    r = rig()
    assert r.offer(prompt(1, 3)) == 3
    assert r.store.writes == 3
    assert r.offer(prompt(1, 3)) == 0, "pages on their way to L3 are copied again"
    r.settle()
    assert r.offer(prompt(1, 4), used=True) == 1
    r.settle()
    assert r.store.writes == 4
    assert {p.key for p in r.disk.own_pages()} == {i.key for i in prompt(1, 4)}
    r.check_at_rest()


def test_a_page_that_l3_has_is_not_copied_to_l2() -> None:
    infos = prompt(1, 3)
    r = rig(own=infos[:2], foreign=infos[2:])
    assert r.offer(infos) == 0


def test_what_l2_still_has_of_an_evicted_l3_page_is_written_when_used_again() -> None:
    r = rig()
    infos = prompt(1, 2)
    r.offer(infos)
    r.settle()
    for info in reversed(infos):
        r.disk.remove(info.key)
    r.settle()
    assert not r.store.objects
    assert r.offer(infos, used=True) == 0, "L2 has them: no copy from the device"
    r.settle()
    assert len(r.store.objects) == 2


def test_each_tier_extends_what_the_one_above_has() -> None:
    infos = prompt(1, 6)
    r = rig(own=infos[:5])
    for number, info in enumerate(infos[:2]):
        pages = r.lower.pool.allocate(1)
        assert pages == [number]
        r.lower.pool.publish(number, info, 1000)
    r.offer(infos[2:3])  # L3 has it
    r.host.add(infos[2], content(infos[2]))
    assert r.lower.longest(infos) == {Tier.L1: 2, Tier.L2: 1, Tier.L3: 2}
    load = r.begin(infos)
    assert load is not None
    assert [o.page.key for o in r.store.pending("read")] == [i.key for i in infos[3:5]]
    r.settle()
    assert r.bring(load, 2)[0] == [Tier.L2, Tier.L3, Tier.L3]


class TestPolicies:
    def test_selective_copies_what_is_used_again(self) -> None:
        r = rig(write="write-through-selective")
        assert r.offer(prompt(1, 3)) == 0
        assert r.offer(prompt(1, 3), used=True) == 3
        r.settle()
        assert len(r.store.objects) == 3

    def test_second_use_writes_what_a_request_has_used_again(self) -> None:
        r = rig(l3_admission="second-use")
        assert r.offer(prompt(1, 3)) == 3
        r.settle()
        assert not r.store.objects, "a page was written at its first use"
        assert r.offer(prompt(1, 2), used=True) == 0
        r.settle()
        assert len(r.store.objects) == 2

    def test_second_use_also_counts_what_had_to_be_computed_again(self) -> None:
        r = rig(l3_admission="second-use")
        r.offer(prompt(1, 3))
        assert r.lower.drop_host() == 3
        assert r.offer(prompt(1, 2)) == 2
        r.settle()
        assert len(r.store.objects) == 2
        r.check_at_rest()

    def test_second_use_remembers_a_bounded_number_of_keys(self) -> None:
        r = rig(l3_admission="second-use", l2=4)
        for family in range(1500):
            r.offer(prompt(family, 3))
        assert len(r.lower._seen) <= 4 * 1024

    @pytest.mark.parametrize("keep", [True, False])
    def test_short_prompts_are_not_worth_the_disk(self, keep: bool) -> None:
        r = rig(l3_min_tokens=100, keep=keep)
        assert r.offer(prompt(1, 2), prompt_tokens=99) == (2 if keep else 0)
        r.settle()
        assert not r.store.objects
        r.offer(prompt(1, 2), prompt_tokens=100, used=True)
        r.settle()
        assert len(r.store.objects) == 2
        r.check_at_rest()

    @pytest.mark.parametrize("keep", [True, False])
    @pytest.mark.parametrize(
        ("policy", "offer"),
        [({"l3_min_tokens": 100}, (99, True)), ({"l3_admission": "second-use"}, (1000, False))],
    )
    def test_write_back_leaves_out_what_is_not_worth_the_disk(
        self, keep: bool, policy: dict[str, Any], offer: tuple[int, bool]
    ) -> None:
        r = rig(write="write-back", keep=keep, **policy)
        poor, good = prompt(1, 2), prompt(2, 2)
        r.leave([Offer(0, info, *offer) for info in poor])
        r.leave([Offer(0, info, 100, used=True) for info in good])
        r.drain()
        assert {p.key for p in r.disk.own_pages()} == {info.key for info in good}
        assert r.lower.longest(poor)[Tier.L2] == (2 if keep else 0)
        assert r.lower.counts.by_tier[Tier.L3].drops == 0
        r.check_at_rest()

    def test_write_back_writes_what_a_longer_prompt_has_used_since(self) -> None:
        r = rig(write="write-back", l3_min_tokens=100)
        infos = prompt(1, 2)
        r.leave([Offer(0, info, 99, used=False) for info in infos])
        r.drain()
        assert not r.store.objects
        assert r.offer(infos, used=True, prompt_tokens=100) == 0
        assert not r.store.operations, "the disk is written although L2 has room"
        r.drain()
        assert len(r.store.objects) == 2
        r.offer(infos, used=True, prompt_tokens=100)
        r.drain()
        assert r.store.writes == 2
        r.check_at_rest()

    def test_write_back_copies_what_l1_gives_up(self) -> None:
        r = rig(write="write-back", l1=2)
        pool = r.lower.pool
        infos = prompt(1, 2)
        pages = pool.allocate(2)
        assert pages is not None
        for page, info in zip(pages, infos, strict=True):
            pool.publish(page, info, 1000)
        assert r.offer(infos, used=True) == 0
        pool.release(pages)
        pool.allocate(1)
        (leaving,) = r.lower.take_leaving()
        assert (leaving.page, leaving.info) == (pages[1], infos[1]), "a leaf goes before its parent"
        r.lower.saved(leaving, content(leaving.info))
        assert not r.store.operations, "the disk is written although L2 has room"
        assert r.lower.take_leaving() == []

    @pytest.mark.parametrize("keep", [True, False])
    def test_write_back_copies_nothing_that_has_not_come_up_yet(self, keep: bool) -> None:
        """A page that L1 gives up before the step that would have brought it up."""
        (info,) = prompt(1, 1)
        r = rig(write="write-back", l1=1, keep=keep, own=[info])
        pool, leaving = r.lower.pool, []
        load = r.begin([info])
        assert load is not None
        r.settle()
        for _ in range(2):
            pages = pool.allocate(1)
            assert pages is not None
            if load.held:
                r.bring(load)
                r.lower.end(load)
                r.lower.drop_host()
                assert r.disk.remove(info.key)
            pool.publish(pages[0], info, 1000)
            pool.release(pages)
            other = pool.allocate(1)  # in the same turn
            assert other is not None
            pool.release(other)
            leaving.append([o.info for o in r.lower.take_leaving()])
        assert leaving == [[], [info]]

    def test_write_back_cleans_ahead_of_eviction(self) -> None:
        r = rig(write="write-back", l2=16)
        for family in range(60):
            (info,) = prompt(family, 1)
            r.lower.saved(Offer(0, info, 0, used=True), content(info))
            r.settle()
            r.check()
        assert len(r.store.objects) >= 60 - 16, "pages were lost that only L2 had"
        assert r.host.tree.evictions == 60 - 16
        everywhere = {p.info.key for p in r.host.pages()} | {p.key for p in r.disk.own_pages()}
        assert len(everywhere) == 60

    @pytest.mark.parametrize("l2", [1, 2, 3])
    def test_write_back_cleans_an_l2_of_next_to_no_pages(self, l2: int) -> None:
        r = rig(write="write-back", l2=l2)
        for family in range(9):
            r.leave([Offer(0, info, 100, used=True) for info in prompt(family, 1)])
            r.settle()
        r.drain()
        assert len(r.store.objects) == 9
        r.check_at_rest()

    def test_write_back_counts_what_l2_gives_up_before_it_is_written(self) -> None:
        r = rig(write="write-back", l2=8)
        for family in range(20):  # of a store that does not answer
            r.leave([Offer(0, info, 100, used=True) for info in prompt(family, 1)])
        r.drain()
        lost = r.lower.counts.by_tier[Tier.L3].drops
        assert lost > 0
        assert lost + len(r.store.objects) == 20
        r.check_at_rest()

    def test_write_back_writes_all_of_it_on_demand(self) -> None:
        r = rig(write="write-back", l2=16)
        infos = prompt(1, 10)
        for info in infos:
            r.lower.saved(Offer(0, info, 0, used=True), content(info))
        drained: list[bool] = []
        r.lower.when_drained(lambda: drained.append(True))
        assert not drained
        r.settle()
        assert drained
        assert len(r.store.objects) == 10
        r.check_at_rest()


class TestStaging:
    """L2 is off: pages only pass through host memory."""

    def test_a_page_leaves_when_it_is_written(self) -> None:
        r = rig(keep=False, l2=4)
        r.offer(prompt(1, 3))
        assert len(r.host.tree) == 3
        r.answer("write", count=1)
        assert len(r.host.tree) == 2
        r.settle()
        r.check_at_rest()
        assert len(r.store.objects) == 3
        assert r.hit(prompt(1, 3)) == [Tier.L3] * 3
        r.check_at_rest()

    def test_what_finds_it_full_is_dropped_and_counted(self) -> None:
        r = rig(keep=False, l2=4)
        for family in range(7):
            r.offer(prompt(family, 1))
        r.settle()
        assert len(r.store.objects) == 4
        assert r.lower.counts.by_tier[Tier.L3].drops == 3
        r.check_at_rest()

    def test_a_disk_out_of_service_drops_pages_and_nothing_else(self) -> None:
        r = rig(keep=False)
        for family in range(3):
            r.offer(prompt(family, 1))
            r.answer("write", Reason.IO)
        assert not r.lower.writing.allows()
        r.offer(prompt(9, 2))
        r.check_at_rest()
        r.clock.now += 2
        r.offer(prompt(9, 2))
        r.settle()
        assert len(r.store.objects) == 1, "one probe"
        r.offer(prompt(9, 2))
        r.settle()
        assert len(r.store.objects) == 2

    def test_a_full_disk_drops_pages_and_nothing_else(self) -> None:
        r = rig(keep=False, l3=0)
        r.offer(prompt(1, 2))
        r.check_at_rest()
        assert r.lower.counts.by_tier[Tier.L3].drops == 2


class TestLongPrompts:
    """Prompts of more pages than L2 has."""

    @pytest.mark.parametrize("keep", [True, False])
    def test_all_of_it_reaches_l3_and_comes_back(self, keep: bool) -> None:
        r = rig(l2=8, l3=64, keep=keep)
        infos = prompt(1, 40)
        for start in range(0, 40, 4):
            r.offer(infos[start : start + 4])
            r.settle()
            r.check()
        assert len(r.store.objects) == 40
        assert len(r.hit(infos)) == 40
        r.check_at_rest()

    def test_without_l3_its_first_pages_stay(self) -> None:
        r = rig(l2=8)
        r.lower.disk = None
        infos = prompt(1, 40)
        r.offer(infos)
        assert r.lower.longest(infos)[Tier.L2] == 8

    def test_pages_that_only_l2_has_are_not_given_up_for_it(self) -> None:
        r = rig(l2=8, l3_min_tokens=10)
        infos = prompt(1, 12)
        r.offer(infos, prompt_tokens=9)
        assert r.lower.longest(infos)[Tier.L2] == 8

    def test_pinned_pages_are_not_given_up_for_it(self) -> None:
        infos = prompt(1, 6)
        r = rig(l2=4, own=infos)
        for info in infos[:2]:
            r.host.add(info, content(info))
        r.lower.pin(infos[:2], 1e9)
        assert r.hit(infos) == [Tier.L2] * 2 + [Tier.L3] * 4
        assert r.host.tree.pinned == 2
        assert r.lower.drop_host(stored_only=True) == 2, "pages are demoted in spite of a pin"
        assert [page.info for page in r.host.pages()] == infos[1::-1]
        r.check_at_rest()


class TestFaults:
    @pytest.mark.parametrize("policy", ["write-through", "write-back"])
    def test_a_store_that_hangs_keeps_no_pages_that_l2_has_given_up(self, policy: str) -> None:
        r = rig(l2=8, write=policy)
        for family in range(500):
            (info,) = prompt(family, 1)
            r.lower.saved(Offer(0, info, 1000, used=True), content(info))
            r.lower.flush_dirty()
            assert r.lower.pending_writes <= 2 * 8 + 4
        r.settle()
        r.check_at_rest()
        counts = r.lower.counts.by_tier[Tier.L3]
        assert len(r.store.objects) == counts.stores >= 4
        assert counts.stores + counts.drops == 500

    @pytest.mark.parametrize("reason", [Reason.NO_SPACE, Reason.TIMEOUT])
    def test_failing_writes_take_writing_out_of_service_not_reading(self, reason: Reason) -> None:
        r = rig(own=prompt(9, 1))
        for family in range(3):
            r.offer(prompt(family, 1))
            r.answer("write", reason)
        assert r.lower.writing.state == "open"
        assert r.hit(prompt(9, 1)) == [Tier.L3]
        assert r.disk.errors == {f"write_{reason.value}": 3}
        r.check_at_rest()

    def test_three_failed_reads_in_a_row_take_reading_out_of_service(self) -> None:
        infos = prompt(1, 4)
        r = rig(own=infos)
        load = r.begin(infos)
        assert load is not None
        r.answer("read", Reason.IO, count=3)
        r.settle()
        assert r.bring(load)[0] == []
        r.lower.end(load)
        assert r.hit(infos[:3]) == []
        assert r.store.reads == 4, "a store that is out of service is asked"
        r.clock.now += 1.1
        load = r.begin(infos)
        assert load is not None
        assert len(r.store.pending("read")) == 1, "one page as a probe"
        r.settle()
        r.lower.end(load)
        assert r.hit(infos) == [Tier.L2, Tier.L3, Tier.L3, Tier.L2]
        r.check_at_rest()

    @pytest.mark.parametrize("reason", [Reason.CORRUPT, Reason.SIZE, Reason.MISMATCH, Reason.VERSION])
    def test_a_bad_page_is_quarantined_and_what_is_before_it_is_kept(self, reason: Reason) -> None:
        infos = prompt(1, 4)
        r = rig(own=infos[:2], foreign=infos[2:])
        for bad in (1, 2):
            r.lower.drop_host()
            load = r.begin(infos)
            assert load is not None
            for operation in r.store.pending("read"):
                r.store.finish(operation, reason if operation.page.key == infos[bad].key else None)
            r.deliver()
            assert len(r.bring(load)[0]) == bad
            r.lower.end(load)
            assert r.store.quarantined[-1].key == infos[bad].key
            r.settle()
            r.check_at_rest()
            if bad == 1:
                r.offer(infos[:2])  # the page is computed anew
                r.settle()
        assert r.disk.quarantined == 2
        assert r.disk.errors == {f"read_{reason.value}": 2}
        assert r.lower.reading.state == "closed"

    def test_a_deleted_file_is_a_miss_and_forgotten(self) -> None:
        infos = prompt(1, 3)
        r = rig(own=infos)
        del r.store.objects[r.disk.own_pages()[1].name]
        assert r.hit(infos) == [Tier.L3]
        assert r.disk.find(infos[1]) is None
        assert r.disk.errors == {"read_missing": 1}
        r.check_at_rest()

    def test_bytes_that_make_no_page_are_a_miss(self) -> None:
        class NoMemory:
            def page_to_bytes(self, page: object, /) -> object:
                return page

            def page_from_bytes(self, data: object, /) -> object:
                raise MemoryError("no host memory")

        infos = prompt(1, 2)
        r = rig(own=infos, codec=NoMemory())
        assert r.hit(infos) == []
        r.check_at_rest()

    def test_a_copy_that_was_lost_with_its_step_is_not_served(self) -> None:
        r = rig()
        infos = prompt(1, 3)
        r.offer(infos)
        r.answer("write", count=1)
        lost = {content(i).tobytes() for i in infos[1:]}
        r.lower.drop_unusable(lambda payload: payload.tobytes() not in lost)
        assert r.lower.longest(infos) == {Tier.L1: 0, Tier.L2: 1, Tier.L3: 0}
        r.answer("write", Reason.IO)
        r.check_at_rest()
        assert r.hit(infos) == [Tier.L2]


class TestDraining:
    def test_it_waits_for_what_was_wanted_before_and_not_for_what_comes_later(self) -> None:
        r = rig(l2=32)
        r.offer(prompt(0, 6))
        drained: list[int] = []
        r.lower.when_drained(lambda: drained.append(len(r.store.objects)))
        for family in range(1, 12):  # a busy engine: there is always another write under way
            r.offer(prompt(family, 1))
            assert r.lower.pending_writes
            r.answer("write", count=1)
        assert drained == [6]

    def test_failed_and_dropped_writes_count_as_done(self) -> None:
        r = rig()
        r.offer(prompt(1, 8))
        drained: list[bool] = []
        r.lower.when_drained(lambda: drained.append(True))
        while r.store.pending("write"):
            assert not drained
            r.answer("write", Reason.IO, count=1)
        assert drained == [True]
        r.check_at_rest()

    def test_nothing_to_write_is_drained_at_once(self) -> None:
        r = rig()
        drained: list[bool] = []
        r.lower.when_drained(lambda: drained.append(True))
        assert drained


class TestPins:
    def test_a_pinned_prefix_stays_in_every_tier_until_its_time(self) -> None:
        infos = prompt(1, 3)
        r = rig(l2=8, l3=8)
        r.offer(infos)
        r.settle()
        r.lower.pin(infos, until=r.clock.now + 10)
        for family in range(2, 30):
            r.offer(prompt(family, 1))
            r.settle()
        assert r.lower.longest(infos)[Tier.L2] == 3
        assert all(r.disk.find(i) for i in infos)
        r.clock.now += 11
        r.lower.expire_pins()
        for family in range(30, 50):
            r.offer(prompt(family, 1))
            r.settle()
        assert r.lower.longest(infos) == dict.fromkeys(Tier, 0)
        assert not r.lower._pins
        r.check_at_rest()

    def test_half_of_each_tier_stays_free_for_everything_else(self) -> None:
        infos = prompt(1, 6)
        r = rig(l2=10, l3=64)
        r.offer(infos)
        r.settle()
        with pytest.raises(FailedPreconditionError, match="6 pages would be pinned; at most half of l2's 10"):
            r.lower.pin(infos, until=1e9)
        assert not r.lower._pins
        r.lower.pin(infos[:5], until=1e9)
        with pytest.raises(FailedPreconditionError):
            r.lower.pin(prompt(2, 1), until=1e9)
        r.lower.pin(infos[:5], until=2e9)  # a longer pin of the same pages is no further page
        assert r.lower.unpin(infos) == 5
        assert r.lower.unpin(infos) == 0
        r.check_at_rest()

    def test_staging_bounds_no_pin(self) -> None:
        infos = prompt(1, 12)
        r = rig(l1=64, l2=16, l3=64, keep=False, own=infos)
        r.lower.pin(infos, until=1e9)
        assert r.disk.tree.pinned == 12


class TestCounts:
    def test_hits_and_misses_by_tier(self) -> None:
        infos = prompt(1, 5)
        r = rig(own=infos[:3])
        r.begin(infos)
        assert [r.lower.counts.by_tier[t].misses for t in Tier] == [2, 2, 2]
        r.lower.count_hit(Tier.L3, 4)
        assert r.lower.counts.by_tier[Tier.L3].hits == 1
        assert r.lower.counts.by_tier[Tier.L3].hit_tokens == 4

    def test_a_page_that_a_tier_served_was_a_miss_in_those_above(self) -> None:
        r = rig()
        r.lower.count_hit(Tier.L3, 4)
        r.lower.count_hit(Tier.L2, 4)
        r.lower.count_hit(Tier.L1, 4)
        assert [r.lower.counts.by_tier[t].misses for t in Tier] == [2, 1, 0]
        assert [r.lower.counts.by_tier[t].hits for t in Tier] == [1, 1, 1]

    def test_pages_brought_up_are_counted_where_they_were(self) -> None:
        infos = prompt(1, 3)
        r = rig(own=infos)
        assert r.hit(infos) == [Tier.L3] * 3
        assert r.lower.counts.by_tier[Tier.L3].loads == 3
        assert r.lower.counts.by_tier[Tier.L2].loads == 0
        assert r.hit(infos) == [Tier.L2] * 3
        assert r.lower.counts.by_tier[Tier.L2].loads == 3
