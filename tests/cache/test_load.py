from __future__ import annotations

import pytest

from jkv.cache.gate import PROBE_AFTER_S
from jkv.cache.l3.reasons import Reason
from jkv.cache.load import PageState
from jkv.cache.pages import Source, Tier
from tests.cache.tiers import PAGE, Rig, prompt, rig


def stored(pages: int, **settings: object) -> Rig:
    """Tiers whose disk has the first pages of prompt 1."""
    return rig(own=prompt(1, pages), **settings)  # type: ignore[arg-type]


def test_reads_start_at_once_and_only_for_what_no_higher_tier_has() -> None:
    infos = prompt(1, 8)
    r = stored(8)
    assert r.hit(infos[:3]) == [Tier.L3] * 3
    load = r.begin(infos)
    assert load is not None
    assert [o.page.key for o in r.store.pending("read")] == [i.key for i in infos[3:]]
    r.settle()
    assert r.bring(load)[0] == [Tier.L2] * 3 + [Tier.L3] * 5
    r.lower.end(load)
    r.check_at_rest()


def test_nothing_is_begun_where_nothing_is_below() -> None:
    r = stored(3)
    assert r.begin(prompt(2, 5)) is None
    assert r.store.reads == 0


def test_pages_are_taken_in_order_as_they_arrive() -> None:
    infos = prompt(1, 4)
    r = stored(4)
    load = r.begin(infos)
    assert load is not None
    first, second, third, last = r.store.pending("read")
    for operation in (second, last):
        r.store.finish(operation)
    r.deliver()
    assert r.bring(load) == ([], PageState.COMING)
    r.store.finish(first)
    r.deliver()
    assert r.bring(load) == ([Tier.L3] * 2, PageState.COMING)
    r.store.finish(third)
    r.deliver()
    assert r.bring(load, 2) == ([Tier.L3] * 2, PageState.ABSENT)
    r.lower.end(load)
    r.check_at_rest()


def test_a_failed_page_ends_the_load_there() -> None:
    r = stored(4)
    load = r.begin(prompt(1, 4))
    assert load is not None
    r.store.finish(r.store.pending("read")[2], Reason.IO)
    r.settle()
    assert r.bring(load) == ([Tier.L3] * 2, PageState.ABSENT)
    assert load.end == 2
    r.lower.end(load)
    r.check_at_rest()


class TestLateness:
    def test_what_is_late_is_given_up_and_what_came_is_kept(self) -> None:
        infos = prompt(1, 4)
        r = stored(4, load_timeout_s=5.0)
        load = r.begin(infos)
        assert load is not None
        r.clock.now += 100  # nobody waited for it
        r.answer("read", count=1)
        assert r.bring(load) == ([Tier.L3], PageState.COMING)
        r.clock.now += 4.9
        assert r.bring(load, 1) == ([], PageState.COMING)
        r.clock.now += 0.2
        assert r.bring(load, 1) == ([], PageState.ABSENT)
        assert r.lower.counts.late_loads == 1
        r.lower.end(load)
        r.deliver()
        assert not r.store.pending("read"), "a read that nobody waits for goes on"
        r.check_at_rest()
        assert r.hit(infos) == [Tier.L2, *[Tier.L3] * 3]

    def test_a_read_for_two_goes_on_for_the_other(self) -> None:
        infos = prompt(1, 2)
        r = stored(2, load_timeout_s=5.0)
        first = r.begin(infos)
        assert first is not None
        assert r.lower.settled(first) is False
        r.clock.now += 5.1
        second = r.begin(infos)
        assert second is not None
        assert r.lower.settled(first)
        r.lower.end(first)
        assert len(r.store.pending("read")) == 2
        r.settle()
        assert r.bring(second)[0] == [Tier.L3] * 2
        r.lower.end(second)
        r.check_at_rest()

    def test_auto_waits_about_as_long_as_computing_takes(self) -> None:
        r = stored(4, load="auto", load_timeout_s=30.0)
        r.lower.gate.record_prefill(100, 1.0)
        load = r.begin(prompt(1, 4))
        assert load is not None
        assert r.bring(load)[1] is PageState.COMING
        r.clock.now += 4 * PAGE / 100
        assert r.bring(load)[1] is PageState.COMING
        r.clock.now += 1.0
        assert r.bring(load)[1] is PageState.ABSENT
        r.lower.end(load)
        r.deliver()
        r.check_at_rest()

    def test_loads_that_are_late_in_a_row_take_the_disk_out_of_service(self) -> None:
        r = stored(2, load_timeout_s=1.0)
        for _ in range(3):
            load = r.begin(prompt(1, 2))
            assert load is not None
            assert r.bring(load)[1] is PageState.COMING
            r.clock.now += 1.1
            assert r.bring(load)[1] is PageState.ABSENT
            r.lower.end(load)
            r.deliver()
        assert r.lower.reading.state == "open"
        reads = r.store.reads
        assert r.hit(prompt(1, 2)) == []
        assert r.store.reads == reads
        r.check_at_rest()


class TestGate:
    def test_loads_slower_than_computing_are_not_made_until_it_is_time_to_look_again(self) -> None:
        infos = prompt(1, 4)
        r = stored(4, load="auto")
        r.lower.gate.record_prefill(1000, 1.0)
        r.lower.gate.record_load(Tier.L3, 4, 5.0)
        assert r.begin(infos) is None
        assert (r.store.reads, r.lower.gate.gated) == (0, 1)
        r.clock.now += PROBE_AFTER_S + 1
        assert r.hit(infos) == [Tier.L3] * 4
        r.lower.drop_host()
        assert r.hit(infos) == [Tier.L3] * 4, "the probe showed that it is fast again"

    def test_always_loads_whatever_it_takes(self) -> None:
        r = stored(4)
        r.lower.gate.record_prefill(1000, 1.0)
        r.lower.gate.record_load(Tier.L3, 4, 5.0)
        assert r.hit(prompt(1, 4)) == [Tier.L3] * 4

    def test_pages_of_l2_that_follow_gated_ones_are_not_loaded_alone(self) -> None:
        infos = prompt(1, 4)
        r = stored(4, load="auto")
        assert len(r.hit(infos)) == 4
        for info in infos[:2]:
            page = r.host.find(info)
            assert page is not None
            r.host.drop(page)
        r.lower.gate.record_prefill(1000, 1.0)
        r.lower.gate.record_load(Tier.L3, 4, 500.0)
        assert r.begin(infos) is None


class TestCancelling:
    def test_ending_a_load_cancels_its_reads(self) -> None:
        r = stored(4)
        load = r.begin(prompt(1, 4))
        assert load is not None
        r.answer("read", count=1)
        r.lower.end(load)
        assert not r.store.pending("read")
        r.deliver()
        r.check_at_rest()
        assert r.disk.errors == {}, "what nobody wants any more is no error"
        assert r.hit(prompt(1, 4)) == [Tier.L2, *[Tier.L3] * 3]

    def test_a_request_right_after_a_cancelled_one_gets_its_pages(self) -> None:
        """The cancelled reads' outcomes are still on their way when it comes."""
        r = stored(4)
        load = r.begin(prompt(1, 4))
        assert load is not None
        r.lower.end(load)
        again = r.begin(prompt(1, 4))
        assert again is not None
        r.settle()
        assert r.bring(again)[0] == [Tier.L3] * 4
        r.lower.end(again)
        r.check_at_rest()

    @pytest.mark.parametrize("keep", [True, False])
    def test_500_times_leaves_nothing(self, keep: bool) -> None:
        r = stored(4, keep=keep, l2=8)
        for number in range(500):
            load = r.begin(prompt(1, 4))
            assert load is not None
            if number % 3 == 1:
                r.answer("read", count=number % 4)
            if number % 5 == 2:
                r.bring(load)
            if number % 7 == 3:
                for operation in r.store.pending("read"):
                    r.store.finish(operation)  # read, but not yet delivered
            r.lower.end(load)
            if number % 2:
                r.deliver()
            r.check()
            r.deliver()
            r.lower.drop_host()
        r.check_at_rest()
        assert r.hit(prompt(1, 4)) == [Tier.L3] * 4


class TestWindow:
    @pytest.mark.parametrize("keep", [True, False])
    def test_reads_leave_room_for_saving(self, keep: bool) -> None:
        r = stored(40, l2=16, keep=keep)
        load = r.begin(prompt(1, 40))
        assert load is not None
        assert len(r.store.pending("read")) == 9, "half of it while the request is queued"
        tiers: list[Source] = []
        while True:
            more, state = r.bring(load, len(tiers))
            tiers += more
            assert r.host.held <= 13, "three quarters of it when the request runs"
            if state is PageState.ABSENT:
                break
            r.answer("read", count=1)
            r.check()
        assert tiers == [Tier.L3] * 40
        r.lower.end(load)
        r.check_at_rest()

    def test_writes_that_pile_up_do_not_keep_pages_from_being_read(self) -> None:
        r = stored(4, l2=16)
        for family in range(2, 40):
            r.offer(prompt(family, 1))
        load = r.begin(prompt(1, 4))
        assert load is not None
        r.answer("read")
        assert r.bring(load)[0] == [Tier.L3] * 4
        r.lower.end(load)
        r.settle()
        r.check_at_rest()

    def test_l2_goes_on_taking_pages_while_writes_pile_up(self) -> None:
        r = rig(l2=16, l3=256)
        for family in range(200):
            assert r.offer(prompt(family, 1)) == 1
            assert r.lower.longest(prompt(family, 1))[Tier.L2] == 1, "a stuck disk fills L2"
            r.check()
        r.settle()
        r.check_at_rest()

    @pytest.mark.parametrize("keep", [True, False])
    def test_loads_side_by_side_all_get_their_pages(self, keep: bool) -> None:
        """Of 8 prompts with 6 pages each, L2 has room for one and a half at a time."""
        prompts = [prompt(family, 6) for family in range(8)]
        r = rig(l2=16, keep=keep, own=[info for infos in prompts for info in infos])
        loads = [r.begin(infos) for infos in prompts]
        tiers: list[list[Tier]] = [[] for _ in prompts]
        for _ in range(200):
            for load, got in zip(loads, tiers, strict=True):
                assert load is not None
                if len(got) < 6 and r.lower.settled(load):
                    more, state = r.bring(load, len(got))
                    got += more
                    assert state is not PageState.ABSENT or len(got) == 6, "a page on the disk was given up"
            r.answer("read", count=1)
            r.check()
        assert all(len(got) == 6 for got in tiers)
        for load in loads:
            assert load is not None
            r.lower.end(load)
        r.check_at_rest()

    @pytest.mark.parametrize("l2", [1, 2, 3, 8])
    def test_a_running_request_does_not_wait_for_queued_ones(self, l2: int) -> None:
        """They hold what they may, and are not admitted before it has ended."""
        mine, others = prompt(1, 2), prompt(2, 8)
        r = rig(l2=l2, own=[*mine, *others])
        queued = r.begin(others)
        load = r.begin(mine)
        assert queued is not None
        assert load is not None
        r.answer("read")
        assert not r.lower.settled(load), "while it is queued itself it waits"
        tiers: list[Source] = []
        state = PageState.COMING
        while state is PageState.COMING and len(tiers) < 2:
            more, state = r.bring(load, len(tiers))
            tiers += more
            assert r.store.pending("read") or state is PageState.ABSENT or len(tiers) == 2
            r.answer("read")
        assert len(tiers) == (2 if l2 > 2 else 0)
        for ended in (load, queued):
            r.lower.end(ended)
        r.check_at_rest()
