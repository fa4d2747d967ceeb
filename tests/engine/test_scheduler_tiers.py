"""The scheduler, the copies around its steps and the admin calls, over tiers below L1; on a device that is
nothing but page contents.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.cache.l1 import Offer
from jkv.cache.l3.reasons import Reason
from jkv.cache.pages import PageInfo, Tier, page_infos
from jkv.engine.cache_admin import CacheAdmin
from jkv.engine.request import FinishReason
from jkv.engine.runner import Runner
from jkv.engine.scheduler import Chunk, Limits, Scheduler
from jkv.engine.sequence import Sequence as Seq
from jkv.engine.transfers import Transfers
from jkv.errors import FailedPreconditionError
from tests.cache.tiers import Rig, rig
from tests.engine.test_scheduler import PAGE, Machine, expected

_EMPTY = -1


class TokenCodec:
    """Pages in host memory that are the tokens whose keys and values they would hold."""

    def page_to_bytes(self, page: np.ndarray, /) -> np.ndarray:
        return page.view(np.uint8)

    def page_from_bytes(self, data: np.ndarray, /) -> np.ndarray:
        return data.view(np.int64)


@dataclass
class Device:
    """Copies pages as the runner does: in the order of the calls, between the steps."""

    contents: dict[tuple[int, int], int]

    def save(self, pages: Sequence[int]) -> list[np.ndarray]:
        return [
            np.asarray([self.contents.get((page, i), _EMPTY) for i in range(PAGE)], np.int64)
            for page in pages
        ]

    def restore(self, pages: Sequence[int], host_pages: Sequence[np.ndarray]) -> None:
        for page, tokens in zip(pages, host_pages, strict=True):
            self.contents.update({(page, i): int(token) for i, token in enumerate(tokens)})

    def usable(self, page: np.ndarray) -> bool:
        return True

    def wait(self) -> None:
        """All is done at once."""


@dataclass
class TieredMachine(Machine):
    """A machine whose loop also moves pages between the tiers, as the engine's does."""

    rig: Rig = field(kw_only=True)

    def __post_init__(self) -> None:
        self.device = Device(self.contents)
        self.transfers = Transfers(self.scheduler, cast(Runner, self.device))
        self.admin = CacheAdmin(self.scheduler, self.transfers, page_bytes=8 * PAGE)
        saved = self.scheduler.lower.saved

        def checked(offer: Offer, payload: np.ndarray) -> Any:
            tokens = np.frombuffer(offer.info.tokens, "<u4").tolist()
            assert payload.tolist() == tokens, "a page is saved under the key of another"
            return saved(offer, payload)

        self.scheduler.lower.saved = checked

    def step(self) -> list[Chunk]:
        self.rig.deliver()
        chunks = self.scheduler.schedule()
        self.largest = max(self.largest, sum(c.count for c in chunks))
        self.transfers.before_step(alone=not self.pending)
        for chunk in chunks:
            self._write(chunk)
        sampled = [(c.seq, self._read(c)) for c in chunks if c.sample]
        self._commit(self.pending)
        self.pending = sampled
        self.transfers.after_step()
        self.scheduler.check()
        return chunks

    def run(self, limit: int = 2000) -> None:
        """Until every sequence has finished; the store answers everything, well."""
        for _ in range(limit):
            self.rig.settle()
            if not self.step() and not self.pending and self.scheduler.idle and self.transfers.idle:
                self.rig.settle()
                return
        raise AssertionError("the scheduler does not finish")

    def one(self, prompt: list[int], max_tokens: int = 1, **fields: object) -> Seq:
        """Runs a request alone and checks its tokens."""
        seq = self.add(prompt, max_tokens, **fields)
        self.run()
        assert seq.tokens == expected(prompt, max_tokens)
        return seq

    def fail_step(self) -> list[Seq]:
        """A step was scheduled and could not be dispatched: the device's buffers are lost."""
        self.scheduler.schedule()
        self.transfers.before_step(alone=False)
        failed = self.scheduler.abandon()
        for seq in failed:
            seq.finish_reason = FinishReason.ERROR
        self.contents.clear()
        self.last_tokens.clear()
        self.pending = []
        self.transfers.failed()
        self.scheduler.check()
        return failed

    def flush(self, *tiers: Tier) -> None:
        self.admin.flush(tiers, lambda counts: None)
        self.rig.settle()


def machine(
    *, pages: int = 64, seqs: int = 4, batched: int = 16, mixed: int = 8, restores: int = 16, **tiers: Any
) -> TieredMachine:
    r = rig(l1=pages, codec=TokenCodec(), **tiers)
    limits = Limits(
        max_num_seqs=seqs, max_batched_tokens=batched, max_mixed_tokens=mixed, max_mixed_restores=restores
    )
    return TieredMachine(Scheduler(r.lower.pool, limits, r.lower), rig=r)


PROMPT = list(range(30))  # 7 full pages and a half


def test_a_prompt_comes_back_from_each_tier() -> None:
    m = machine()
    assert m.one(PROMPT).cached == {}
    assert m.one(PROMPT).cached == {Tier.L1: 28}
    m.flush(Tier.L1)
    assert m.one(PROMPT).cached == {Tier.L2: 28}
    m.flush(Tier.L1, Tier.L2)
    assert m.one(PROMPT).cached == {Tier.L3: 28}
    m.flush(Tier.L1, Tier.L3)
    assert m.one(PROMPT).cached == {Tier.L2: 28}
    m.flush(*Tier)
    assert m.one(PROMPT).cached == {}


def test_tiers_share_a_prefix() -> None:
    m = machine()
    m.one(PROMPT)
    m.flush(Tier.L1, Tier.L2)
    m.one(PROMPT[:20])
    m.flush(Tier.L1)
    m.one(PROMPT[:9])
    assert m.one(PROMPT).cached == {Tier.L1: 8, Tier.L2: 12, Tier.L3: 8}


@pytest.mark.parametrize("length", [3, 4, 5, 8, 12, 13])
def test_the_last_token_is_always_computed(length: int) -> None:
    m = machine()
    m.one(PROMPT[:length])
    for tiers in ([], [Tier.L1], [Tier.L1, Tier.L2]):
        m.flush(*tiers)
        assert m.one(PROMPT[:length], 3).cached_tokens == min(length // PAGE * PAGE, length - 1)


def test_pages_filled_while_decoding_go_down_as_well() -> None:
    m = machine()
    first = m.one([1, 2, 3], 10)
    m.flush(Tier.L1)
    assert m.one([*first.tokens, 9]).cached == {Tier.L2: 12}


def test_salts_and_no_cache_share_nothing_below_either() -> None:
    m = machine(l2=64)
    m.one(PROMPT, cache_salt="a")
    m.one(PROMPT[:12], no_cache=True, cache_salt="c")
    m.flush(Tier.L1)
    assert m.one(PROMPT, cache_salt="b").cached == {}
    assert m.one(PROMPT, cache_salt="a", no_cache=True).cached == {}
    assert m.one(PROMPT, cache_salt="c").cached == {}, "a request with no_cache filled a tier"
    assert m.one(PROMPT, cache_salt="a").cached == {Tier.L2: 28}


def test_demote_copies_no_more_than_l2_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    m = machine(l2=4, write="write-back")
    m.one(list(range(64)))
    save, copied, dropped = m.device.save, [], []

    def counted(pages: Sequence[int]) -> list[np.ndarray]:
        copied.extend(pages)
        return save(pages)

    monkeypatch.setattr(m.device, "save", counted)
    m.admin.demote(Tier.L1, dropped.append)
    assert (len(copied), dropped) == (4, [4])
    assert m.one(list(range(64))).cached == {Tier.L2: 16, Tier.L1: 47}


def test_a_stream_runs_on_while_another_request_loads() -> None:
    m = machine()
    m.one(PROMPT)
    m.flush(Tier.L1, Tier.L2)
    stream = m.add([40, 41], 40)
    m.step()
    loading = m.add(PROMPT, 1)
    reads = m.rig.store.pending("read")
    assert len(reads) == 7
    for operation in reads:
        before = stream.generated
        m.step()
        assert stream.generated == before + 1
        assert loading not in m.finished
        m.rig.store.finish(operation)
    m.step()
    m.step()
    assert loading in m.finished
    assert loading.cached == {Tier.L3: 28}


def test_copies_up_are_spread_over_the_steps_of_a_stream() -> None:
    m = machine(restores=2)
    m.one(PROMPT)
    m.flush(Tier.L1)
    m.add([40, 41], 40)
    m.step()
    m.step()
    loading = m.add(PROMPT, 1)
    for pages in (2, 4, 6):
        m.step()
        assert len(loading.pages) == pages
        assert loading.computed == pages * PAGE
    m.run()
    assert loading.cached == {Tier.L2: 28}


def test_a_request_whose_pages_are_there_overtakes_one_that_waits() -> None:
    m = machine(seqs=1)
    m.one(PROMPT)
    m.flush(Tier.L1, Tier.L2)
    waiting, ready = m.add(PROMPT, 1), m.add([50, 51, 52], 1)
    m.step()
    m.step()
    assert m.finished[-1] is ready
    assert waiting.slot is None
    m.run()
    assert waiting.cached == {Tier.L3: 28}


def test_what_is_late_is_computed() -> None:
    m = machine(load_timeout_s=5.0)
    m.one(PROMPT)
    m.flush(Tier.L1, Tier.L2)
    seq = m.add(PROMPT, 1)
    m.rig.answer("read", count=3)
    for _ in range(3):
        m.step()
    assert len(seq.pages) == 3
    m.rig.clock.now += 5.1
    while seq.finish_reason is None:
        m.step()
    assert seq.cached == {Tier.L3: 12}
    assert seq.tokens == expected(PROMPT, 1)
    m.run()
    m.rig.check_at_rest()


def test_a_request_that_ends_while_it_loads_leaves_nothing() -> None:
    m = machine()
    m.one(PROMPT)
    m.flush(Tier.L1, Tier.L2)
    for arrived in range(7):
        for admitted in (False, True):
            seq = m.add(PROMPT, 1)
            m.rig.answer("read", count=arrived)
            if admitted:
                m.step()
                assert (seq.slot is None) == (arrived == 0)
            m.scheduler.finish(seq, FinishReason.CANCELLED)
            m.run()
            m.rig.check_at_rest()
            assert m.scheduler.pool.counts().in_use == 0
            m.flush(Tier.L1, Tier.L2)
    assert m.one(PROMPT).cached == {Tier.L3: 28}


def test_preempted_while_it_loads() -> None:
    m = machine(pages=12, seqs=2)
    m.one(PROMPT)
    m.flush(Tier.L1, Tier.L2)
    old = m.add([40, 41, 42, 43], 30)
    m.step()
    new = m.add(PROMPT, 4)
    m.rig.answer("read", count=5)
    m.step()
    assert len(new.pages) == 5
    while not new.preempted:
        m.step()
    m.run()
    assert old.tokens == expected([40, 41, 42, 43], 30)
    assert new.tokens == expected(PROMPT, 4)
    m.rig.check_at_rest()


def test_write_back_saves_what_a_page_held_before_its_room_was_given_away() -> None:
    m = machine(pages=8, write="write-back", l2=64)
    prompts = [[100 * i + j for j in range(13)] for i in range(6)]
    for prompt in prompts:
        m.one(prompt, 6)
    for prompt in prompts:
        assert m.one(prompt, 6).cached_tokens == 12


@pytest.mark.parametrize("write", ["write-through", "write-through-selective", "write-back"])
def test_short_prompts_never_reach_the_disk(write: str) -> None:
    """Neither when L1 gives them up, nor at a stop; but for what a longer prompt shares with them."""
    m = machine(pages=8, write=write, l2=64, l3_min_tokens=20)
    short = [[100 * i + j for j in range(13)] for i in range(1, 6)]
    for prompt in (*short, PROMPT[:13], PROMPT, PROMPT, *short, *short):
        m.one(prompt)
    while m.transfers.write_down():
        m.rig.settle()
    m.rig.settle()
    assert {page.key for page in m.rig.disk.own_pages()} == {info.key for info in infos(PROMPT)}


@pytest.mark.parametrize("write", ["write-through", "write-back"])
def test_prefetching_into_a_full_l1_saves_what_it_displaces(write: str) -> None:
    m = machine(pages=8, write=write, l2=64)
    prompts = [[100 * i + j for j in range(17)] for i in range(4)]
    for prompt in prompts:
        m.one(prompt)
    for prompt in prompts:
        found: list[int] = []
        m.admin.prefetch(infos(prompt), Tier.L1, found.append)
        m.run()
        assert found == [16]
    for prompt in prompts:
        assert m.one(prompt).cached_tokens == 16


def test_pages_evicted_by_a_step_that_failed_are_not_saved_from_its_empty_successor() -> None:
    m = machine(pages=8, write="write-back", l2=64)
    for i in range(3):
        m.one([100 * i + j for j in range(13)])
    m.add([7] * 20, 1)
    m.scheduler.schedule()  # evicts
    assert m.scheduler.lower.leaving
    m.scheduler.abandon()
    m.contents.clear()
    m.transfers.failed()
    m.step()
    m.run()


def test_after_a_failed_step_what_is_below_serves() -> None:
    m = machine()
    m.one(PROMPT)
    m.add([90] * 12, 3)
    m.step()
    assert len(m.fail_step()) == 1
    assert m.scheduler.pool.cached == 0
    again = m.one(PROMPT)
    assert again.cached == {Tier.L2: 28}
    m.flush(Tier.L1, Tier.L2)
    assert m.one(PROMPT).cached == {Tier.L3: 28}


def infos(prompt: list[int], salt: str = "") -> list[PageInfo]:
    return page_infos(salt.encode(), salt.encode(), prompt, PAGE)


class Storm:
    """Requests, answers of the store, admin calls and failures, in any order."""

    def __init__(self, m: TieredMachine, rng: random.Random) -> None:
        self.m, self.rng = m, rng
        self.added: list[tuple[Seq, list[int], int]] = []
        self.asked = self.answered = 0

    def step(self) -> None:
        actions: tuple[Callable[[], object], ...] = (
            *(self.add,) * 6,
            *(self.m.step,) * 8,
            *(self.answer,) * 12,
            self.cancel,
            self.tick,
            self.flush,
            self.prefetch,
            self.prefetch,
            self.demote,
            self.evict,
            self.pin,
            self.drain,
            self.fail if self.rng.random() < 0.3 else self.m.step,
        )
        self.rng.choice(actions)()
        self.m.rig.check()

    def finish(self) -> None:
        self.m.run()
        for seq, prompt, max_tokens in self.added:
            assert seq.finish_reason is not None
            assert seq.load is None
            if seq.finish_reason is FinishReason.LENGTH:
                assert seq.tokens == expected(prompt, max_tokens)
        assert self.answered == self.asked, "an admin call is never answered"
        counts = self.m.scheduler.pool.counts()
        assert counts.in_use == 0, "pages leaked"
        self.m.rig.check_at_rest()

    def family(self, number: int) -> list[int]:
        return [(number * 17 + i) % 5 for i in range(40)]

    def prompt(self) -> list[int]:
        return self.family(self.rng.randrange(4))[: self.rng.randint(1, 26)]

    def salt(self) -> str:
        return self.rng.choice(("", "", "s"))

    def add(self) -> None:
        prompt, max_tokens = self.prompt(), self.rng.randint(1, 6)
        no_cache, priority = self.rng.random() < 0.1, self.rng.choice((0, 0, 1))
        seq = self.m.add(prompt, max_tokens, no_cache=no_cache, cache_salt=self.salt(), priority=priority)
        self.added.append((seq, prompt, max_tokens))

    def answer(self) -> None:
        ready = self.m.rig.store.ready()
        if ready:
            operation = self.rng.choice(ready)
            bad = {"read": (Reason.IO, Reason.CORRUPT), "write": (Reason.IO,), "delete": (Reason.IO,)}
            fails = self.rng.random() < 0.1
            self.m.rig.store.finish(operation, self.rng.choice(bad[operation.kind]) if fails else None)

    def cancel(self) -> None:
        alive = [seq for seq, *_ in self.added if seq.finish_reason is None]
        if alive:
            self.m.scheduler.finish(self.rng.choice(alive), FinishReason.CANCELLED)

    def tick(self) -> None:
        self.m.rig.clock.now += self.rng.choice((0.01, 0.5, 40.0))

    def ask(self) -> Callable[[object], None]:
        self.asked += 1

        def answered(_: object) -> None:
            self.answered += 1

        return answered

    def tiers(self) -> list[Tier]:
        on = [Tier.L1, *([Tier.L2] if self.m.rig.host.keep else []), Tier.L3]
        return self.rng.sample(on, self.rng.randint(1, len(on)))

    def flush(self) -> None:
        self.m.admin.flush(self.tiers(), self.ask())

    def prefetch(self) -> None:
        tier = Tier.L2 if self.m.rig.host.keep and self.rng.random() < 0.3 else Tier.L1
        self.m.admin.prefetch(infos(self.prompt(), self.salt()), tier, self.ask())

    def demote(self) -> None:
        tier = Tier.L2 if self.m.rig.host.keep and self.rng.random() < 0.5 else Tier.L1
        self.m.admin.demote(tier, self.ask())

    def evict(self) -> None:
        if self.rng.random() < 0.5:
            self.m.admin.evict_salt(self.salt().encode(), self.ask())
        else:
            self.m.admin.evict_prefix(infos(self.prompt(), self.salt()), self.ask())

    def pin(self) -> None:
        until = self.rng.choice((self.m.rig.clock.now + 1.0, math.inf))
        some = infos(self.prompt(), self.salt())
        if self.rng.random() < 0.5:
            self.m.admin.unpin(some)
            return
        try:
            self.m.admin.pin(some, until)
        except FailedPreconditionError:
            return

    def drain(self) -> None:
        self.m.admin.drain(self.ask())

    def fail(self) -> None:
        self.m.fail_step()


POLICIES: list[dict[str, Any]] = [
    {},
    {"keep": False},
    {"write": "write-back"},
    {"write": "write-back", "keep": False},
    {"write": "write-through-selective"},
    {"l3_admission": "second-use", "load": "auto", "restores": 1},
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    pages=st.integers(8, 24),
    seqs=st.integers(1, 6),
    batched=st.integers(2, 24),
    l2=st.integers(1, 24),
    l3=st.integers(1, 40),
    steps=st.integers(1, 250),
)
def test_any_order_of_things(
    policy: dict[str, Any], seed: int, steps: int, batched: int, **sizes: int
) -> None:
    tiers = {"load_timeout_s": 1.0, **sizes, **policy}
    storm = Storm(machine(batched=batched, mixed=max(1, batched // 2), **tiers), random.Random(seed))
    for _ in range(steps):
        storm.step()
    storm.finish()
