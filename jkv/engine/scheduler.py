"""Which tokens the next step computes. Pure: no jax, no clock, no I/O. Owner: the engine's thread.

Decodes go first, one token each; what is left of the step's budget goes to prefill chunks, oldest request
first. The step is dispatched right after `schedule`, and a step writes a layer's keys before it reads them:
so a page filled by this step may be shared at once, even with a request of the same step. The same holds for
pages that are copied up from lower tiers: those copies are dispatched before the step.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import Any

from jkv.cache.l1 import L1Pool, Offer
from jkv.cache.load import PageState
from jkv.cache.lower import LowerTiers
from jkv.cache.pages import PageInfo, Source, Tier
from jkv.engine.request import FinishReason
from jkv.engine.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most of each that one step may have."""

    max_num_seqs: int
    max_batched_tokens: int  # of a step that only prefills
    max_mixed_tokens: int  # of a step with decodes in it, these included
    max_mixed_restores: int = 16  # pages copied up before a step with decodes in it


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens `start .. start + count - 1` of a sequence; the last one's successor is sampled if `sample`.

    Pages whose numbers are in `frozen` are shared and full: tokens in them are computed but not written.
    """

    seq: Sequence
    start: int
    count: int
    frozen: frozenset[int]
    sample: bool


class Scheduler:
    """Waiting and running sequences, their slots and their pages.

    `restores` are the pages to be copied up before the step is dispatched, by their number in L1. A running
    sequence with a load is not in any step: what it lacks is still being brought up.
    """

    def __init__(self, pool: L1Pool, limits: Limits, lower: LowerTiers | None = None) -> None:
        self.pool, self.limits = pool, limits
        self.lower = lower or LowerTiers.none(pool)
        self.restores: dict[int, Any] = {}
        self._to_offer: list[tuple[int, PageInfo]] = []  # just filled or used
        self.waiting: list[Sequence] = []  # in order
        self.running: list[Sequence] = []  # in order
        self.preemptions = 0
        self._restore_budget = 0
        self._slots = list(range(limits.max_num_seqs - 1, -1, -1))

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, seq: Sequence) -> None:
        """Queues a sequence; `seq.tokens` must fit the pool as a whole, or it would wait for ever."""
        insort(self.waiting, seq, key=lambda s: s.order)
        infos = self._infos(seq)
        cached = self.lower.cached(infos)
        seq.expected = len(cached) * self.pool.page_size
        if infos:
            seq.load = self.lower.begin(infos, cached=cached, peer=seq.request.peer)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends a sequence, waiting or running, and gives its pages and slot back."""
        assert seq.finish_reason is None
        seq.finish_reason = reason
        self._end_load(seq)
        if seq.slot is None:
            self.waiting.remove(seq)
        else:
            self._leave(seq)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, decodes first; empty where nothing can run now."""
        step: dict[Sequence, Chunk] = {}
        for seq in list(self.running):
            if self._may_run(seq) and seq.is_decoding and self._grow(seq, 1, step):
                step[seq] = self._chunk(seq, 1)
        budget = self._prefill_budget(decodes=len(step))
        self._restore_budget = self.limits.max_mixed_restores if step else self.pool.total
        for seq in list(self.running):
            if seq.load is not None and seq.slot is not None:
                self._bring(seq)
            if budget > 0 and self._may_run(seq) and seq not in step:
                budget -= self._prefill(seq, budget, step)
        while budget > 0 and (seq := self._admit()) is not None:
            if self._may_run(seq):
                budget -= self._prefill(seq, budget, step)
        return list(step.values())

    def take_restores(self) -> dict[int, Any]:
        restores, self.restores = self.restores, {}
        return restores

    def take_offers(self) -> list[Offer]:
        """The pages just filled or used that the lower tiers may want a copy of, after the step."""
        pages, self._to_offer = self._to_offer, []
        return [self.pool.offer(page) for page, info in pages if self.pool.find(info) == page]

    def commit(self, seq: Sequence, token: int) -> None:
        """Takes a token that was sampled for the sequence; the caller decides whether it ends there."""
        seq.unread -= 1
        seq.tokens.append(token)
        if seq.slot is not None:
            self._publish(seq)

    def abandon(self) -> list[Sequence]:
        """Forgets every sequence and page, as after the loss of the device pool; returns those that were
        alive.
        """
        alive = [*self.running, *self.waiting]
        for seq in alive:
            self._end_load(seq)
        self.waiting, self.running = [], []
        self.restores, self._to_offer = {}, []
        self.lower.leaving.clear()
        self.pool.reset()
        self._slots = list(range(self.limits.max_num_seqs - 1, -1, -1))
        return alive

    def check(self) -> None:
        """Raises AssertionError where the bookkeeping contradicts itself."""
        self.pool.check()
        self.lower.check()
        slots = [s.slot for s in self.running]
        assert None not in slots
        assert sorted([*slots, *self._slots]) == list(range(self.limits.max_num_seqs))  # type: ignore[type-var]
        used = {page for s in self.running for page in s.pages}
        assert self.pool.counts().in_use == len(used), "pages in use and pages of sequences differ"
        for seq in self.running:
            assert len(seq.pages) * self.pool.page_size >= seq.computed
            assert seq.shared <= len(seq.pages)
        for seq in self.waiting:
            assert not seq.pages
            assert seq.slot is None
        assert self.running == sorted(self.running, key=lambda s: s.order)
        assert self.waiting == sorted(self.waiting, key=lambda s: s.order)

    def _prefill_budget(self, decodes: int) -> int:
        limits = self.limits
        if decodes == 0:
            return limits.max_batched_tokens
        # Many decodes slow prefill down but must not starve it.
        share = max(limits.max_mixed_tokens - decodes, limits.max_mixed_tokens // 4, 1)
        return min(share, limits.max_batched_tokens - decodes)

    def _prefill(self, seq: Sequence, budget: int, step: dict[Sequence, Chunk]) -> int:
        """Adds the sequence's next chunk to the step; returns its token count, 0 where pages are short."""
        if self._at_boundary(seq):
            self._adopt(seq)
            self._count_hits(seq)
        count = min(budget, seq.length - seq.computed)
        if not self._grow(seq, count, step):
            return 0
        step[seq] = self._chunk(seq, count)
        return count

    def _chunk(self, seq: Sequence, count: int) -> Chunk:
        start, end = seq.computed, seq.computed + count
        first = seq.shared
        seq.computed = end
        merged = self._publish(seq)
        sample = end == seq.length
        seq.unread += int(sample)
        frozen = frozenset(range(start // self.pool.page_size, first)) | merged
        return Chunk(seq=seq, start=start, count=count, frozen=frozen, sample=sample)

    def _may_run(self, seq: Sequence) -> bool:
        return seq.slot is not None and seq.load is None and seq.wants_tokens

    def _admit(self) -> Sequence | None:
        """Moves a waiting sequence to the running ones if there is a slot and room for all its tokens."""
        seq = self._next_waiting() if self._slots else None
        if seq is None:
            return None
        self._adopt(seq)
        if -(-seq.length // self.pool.page_size) - len(seq.pages) > self.pool.available:
            self._drop_pages(seq)
            if not self.running:
                self.pool.unpin_all()  # it has L1 to itself: only pins can be in its way
            return None
        self.waiting.remove(seq)
        seq.slot = self._slots.pop()
        seq.admissions += 1
        insort(self.running, seq, key=lambda s: s.order)
        self._count_hits(seq)
        if seq.load is None and self._full_pages(seq) > seq.shared:
            self._begin_load(seq)  # L1 may have lost since what it had when the sequence came
        if seq.load is not None:
            self._bring(seq)
        return seq

    def _next_waiting(self) -> Sequence | None:
        """The first sequence that waits for no page; else the first that could have some of its pages."""
        arriving = None
        for seq in self.waiting:
            # A token still unread cannot be prefilled: it is known after the next commit.
            if seq.unread:
                break
            if seq.load is None or self.lower.settled(seq.load):
                return seq
            if arriving is None and self.lower.started(seq.load):
                arriving = seq
        return arriving

    def _full_pages(self, seq: Sequence) -> int:
        return 0 if seq.request.no_cache else len(seq.tokens) // self.pool.page_size

    def _at_boundary(self, seq: Sequence) -> bool:
        """Whether cached pages may follow: the sequence ends in a whole page, and all are shared."""
        whole = seq.computed == len(seq.pages) * self.pool.page_size
        return whole and seq.shared == len(seq.pages)

    def _adopt(self, seq: Sequence) -> None:
        """Extends a sequence that stands at a page boundary by the L1 pages that follow."""
        while seq.shared < self._full_pages(seq):
            info = seq.info(seq.shared, self.pool.page_size)
            page = self.pool.find(info)
            if page is None:
                return
            self.pool.acquire(page)
            self._got(seq, page, Tier.L1)

    def _bring(self, seq: Sequence) -> None:
        """Extends a sequence by the pages that its load has ready; ends the load when no more will come."""
        load = seq.load
        assert load is not None
        while True:
            self._adopt(seq)
            if seq.shared == self._full_pages(seq):
                break
            state = self.lower.state(load, seq.shared)
            if state is PageState.COMING or (state is PageState.READY and self._restore_budget == 0):
                self._count_hits(seq)
                return
            pages = self.pool.allocate(1) if state is PageState.READY else None
            if pages is None:
                break
            info = seq.info(seq.shared, self.pool.page_size)
            payload, tier = self.lower.take(load, seq.shared)
            self.restores[self.pool.publish(pages[0], info, seq.prompt_len)] = payload
            self._restore_budget -= 1
            self._got(seq, pages[0], tier)
        self._count_hits(seq)
        self._end_load(seq)

    def _got(self, seq: Sequence, page: int, tier: Source) -> None:
        """Takes a cached page in. The last token is always computed, also where its page is cached: its
        logits are needed.
        """
        seq.pages.append(page)
        seq.shared += 1
        end = max(seq.computed, min(len(seq.pages) * self.pool.page_size, seq.length - 1))
        seq.hits.append((tier, seq.shared - 1, end - seq.computed))
        seq.computed = end

    def _count_hits(self, seq: Sequence) -> None:
        """Counts the pages that an admitted sequence got, and offers them to the lower tiers."""
        for tier, number, tokens in seq.hits:
            if not seq.preempted:
                of_prompt = min(tokens, max(0, seq.prompt_len - number * self.pool.page_size))
                seq.cached[tier] = seq.cached.get(tier, 0) + of_prompt
            self.lower.count_hit(tier, tokens)
            info = seq.info(number, self.pool.page_size)
            self.pool.note_use(info, seq.prompt_len)
            self._to_offer.append((seq.pages[number], info))
        seq.hits.clear()

    def _begin_load(self, seq: Sequence) -> None:
        """Looks again for what is below L1; its misses were counted when the sequence came."""
        if infos := self._infos(seq):
            seq.load = self.lower.begin(infos, count_misses=False)

    def _infos(self, seq: Sequence) -> list[PageInfo]:
        return [seq.info(number, self.pool.page_size) for number in range(self._full_pages(seq))]

    def _end_load(self, seq: Sequence) -> None:
        if seq.load is not None:
            self.lower.end(seq.load)
            seq.load = None

    def _publish(self, seq: Sequence) -> frozenset[int]:
        """Puts the pages that have become full, and whose tokens are known, into the prefix index.

        Returns the numbers of those that gave way to an equal page which was there before.
        """
        size = self.pool.page_size
        merged: set[int] = set()
        while not seq.request.no_cache and (seq.shared + 1) * size <= min(seq.computed, len(seq.tokens)):
            i = seq.shared
            info = seq.info(i, size)
            page = self.pool.publish(seq.pages[i], info, seq.prompt_len)
            self._to_offer.append((page, info))
            if page != seq.pages[i]:
                merged.add(i)
                seq.pages[i] = page
            seq.shared += 1
        return frozenset(merged)

    def _grow(self, seq: Sequence, count: int, step: dict[Sequence, Chunk]) -> bool:
        """Gives a sequence pages for `count` more tokens, preempting where needed those that come after it.

        A sequence already in the step is never preempted: its pages may be published on the promise of that
        step.
        """
        while (needed := -(-(seq.computed + count) // self.pool.page_size) - len(seq.pages)) > 0:
            pages = self.pool.allocate(needed)
            if pages is not None:
                seq.pages += pages
                return True
            victims = [s for s in self.running if s.order >= seq.order and s not in step]
            self._preempt(victims[-1])
            if victims[-1] is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._end_load(seq)
        self._leave(seq)
        seq.preempted = True
        self.preemptions += 1
        insort(self.waiting, seq, key=lambda s: s.order)
        self._begin_load(seq)

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        assert seq.slot is not None
        self._slots.append(seq.slot)
        seq.slot = None
        self._drop_pages(seq)

    def _drop_pages(self, seq: Sequence) -> None:
        self.pool.release(seq.pages)
        seq.pages, seq.shared, seq.computed = [], 0, 0
        seq.hits.clear()
