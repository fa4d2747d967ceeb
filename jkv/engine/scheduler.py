"""Which tokens the next step computes. Pure: no jax, no clock, no I/O. Owner: the engine's thread.

Decodes go first, one token each; what is left of the step's budget goes to prefill chunks, oldest request
first. The step is dispatched right after `schedule`, and a step writes a layer's keys before it reads them:
so a page filled by this step may be shared at once, even with a request of the same step.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from jkv.cache.l1 import L1Pool
from jkv.engine.request import FinishReason
from jkv.engine.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most of each that one step may have."""

    max_num_seqs: int
    max_batched_tokens: int  # of a step that only prefills
    max_mixed_tokens: int  # of a step with decodes in it, these included


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
    """Waiting and running sequences, their slots and their pages."""

    def __init__(self, pool: L1Pool, limits: Limits) -> None:
        self.pool, self.limits = pool, limits
        self.waiting: list[Sequence] = []  # in order
        self.running: list[Sequence] = []  # in order
        self.preemptions = 0
        self._slots = list(range(limits.max_num_seqs - 1, -1, -1))

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, seq: Sequence) -> None:
        """Queues a sequence; `seq.tokens` must fit the pool as a whole, or it would wait for ever."""
        insort(self.waiting, seq, key=lambda s: s.order)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends a sequence, waiting or running, and gives its pages and slot back."""
        assert seq.finish_reason is None
        seq.finish_reason = reason
        if seq.slot is None:
            self.waiting.remove(seq)
        else:
            self._leave(seq)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, decodes first; empty where nothing can run now."""
        step: dict[Sequence, Chunk] = {}
        for seq in list(self.running):
            if seq.slot is not None and seq.wants_tokens and seq.is_decoding and self._grow(seq, 1, step):
                step[seq] = self._chunk(seq, 1)
        budget = self._prefill_budget(decodes=len(step))
        for seq in list(self.running):
            if budget > 0 and seq.slot is not None and seq.wants_tokens and seq not in step:
                budget -= self._prefill(seq, budget, step)
        while budget > 0 and (seq := self._admit()) is not None:
            budget -= self._prefill(seq, budget, step)
        return list(step.values())

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
        self.waiting, self.running = [], []
        self.pool = L1Pool(self.pool.total, self.pool.page_size)
        self._slots = list(range(self.limits.max_num_seqs - 1, -1, -1))
        return alive

    def check(self) -> None:
        """Raises AssertionError where the bookkeeping contradicts itself."""
        self.pool.check()
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
        self._adopt(seq)
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

    def _admit(self) -> Sequence | None:
        """Moves the first waiting sequence to the running ones if there is a slot and room for all its
        tokens.
        """
        # A token still unread cannot be prefilled: it is known after the next commit.
        if not self.waiting or not self._slots or self.waiting[0].unread:
            return None
        seq = self.waiting[0]
        self._adopt(seq)
        if -(-seq.length // self.pool.page_size) - len(seq.pages) > self.pool.available:
            self._drop_pages(seq)
            if not seq.preempted:
                seq.cached_tokens = 0
            return None
        self.waiting.pop(0)
        seq.slot = self._slots.pop()
        seq.admissions += 1
        insort(self.running, seq, key=lambda s: s.order)
        return seq

    def _adopt(self, seq: Sequence) -> None:
        """Extends a sequence that stands at a page boundary by the cached pages that follow.

        The last token is always computed, also where its page is cached: its logits are needed.
        """
        size, before = self.pool.page_size, seq.computed
        if seq.request.no_cache or before != len(seq.pages) * size or seq.shared != len(seq.pages):
            return
        while seq.shared < len(seq.tokens) // size:
            page = self.pool.find(seq.key(seq.shared, size), seq.page_tokens(seq.shared, size))
            if page is None:
                break
            self.pool.acquire(page)
            seq.pages.append(page)
            seq.shared += 1
        seq.computed = max(before, min(len(seq.pages) * size, seq.length - 1))
        if not seq.preempted:
            seq.cached_tokens += seq.computed - before

    def _publish(self, seq: Sequence) -> frozenset[int]:
        """Puts the pages that have become full, and whose tokens are known, into the prefix index.

        Returns the numbers of those that gave way to an equal page which was there before.
        """
        size = self.pool.page_size
        merged: set[int] = set()
        while not seq.request.no_cache and (seq.shared + 1) * size <= min(seq.computed, len(seq.tokens)):
            i = seq.shared
            page = self.pool.publish(seq.pages[i], seq.key(i, size), seq.page_tokens(i, size))
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
        self._leave(seq)
        seq.preempted = True
        self.preemptions += 1
        insort(self.waiting, seq, key=lambda s: s.order)

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        assert seq.slot is not None
        self._slots.append(seq.slot)
        seq.slot = None
        self._drop_pages(seq)

    def _drop_pages(self, seq: Sequence) -> None:
        self.pool.release(seq.pages)
        seq.pages, seq.shared, seq.computed = [], 0, 0
