"""One engine in virtual time: a queue, prompts computed one after the other, slots that decode, an LRU cache.

What takes time is computing prompt tokens, loading pages from host memory, and decoding, at given speeds.
Decoding does not slow prefill. Pages are in L1, then in L2, then gone.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jkv.cache.pages import Tier
from jkv.router.load import NothingReported


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Of one engine, as measured on a real one."""

    prefill_tokens_per_s: float
    l2_bytes_per_s: float
    page_bytes: int
    tpot_s: float
    slots: int


@dataclass(eq=False, kw_only=True)
class Job:
    """A request. `keys` are those of its full pages; times are in virtual seconds."""

    arrival: float
    tokens: int
    keys: Sequence[bytes]
    output_tokens: int
    cached_tokens: int = 0
    first_token: float = field(default=float("inf"))
    end: float = field(default=float("inf"))


class SimCache:
    """Pages of both tiers, least recently used first out, the last pages of a prompt before its first."""

    def __init__(self, l1: int, l2: int) -> None:
        self._capacity = {Tier.L1: l1, Tier.L2: l2}
        self._held: dict[Tier, OrderedDict[bytes, None]] = {Tier.L1: OrderedDict(), Tier.L2: OrderedDict()}
        self._changed: dict[Tier, dict[bytes, bool]] = {Tier.L1: {}, Tier.L2: {}}

    def match(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """Pages of the longest prefix, and how many of them are in L2."""
        below = 0
        for count, key in enumerate(keys):
            if key in self._held[Tier.L1]:
                continue
            if key not in self._held[Tier.L2]:
                return count, below
            below += 1
        return len(keys), below

    def use(self, keys: Sequence[bytes]) -> None:
        """All these pages are in L1 now, unless they are more than it holds."""
        for key in reversed(keys):
            self._held[Tier.L1][key] = None
            self._held[Tier.L1].move_to_end(key)
            self._changed[Tier.L1][key] = True
            if self._held[Tier.L2].pop(key, 0) is None:
                self._changed[Tier.L2][key] = False
        self._push_down()

    def take_changes(self) -> dict[Tier, tuple[bytes, bytes]]:
        """Keys added and removed since the last call, back to back, by tier."""
        changes = {
            tier: (
                b"".join(key for key, there in changed.items() if there),
                b"".join(key for key, there in changed.items() if not there),
            )
            for tier, changed in self._changed.items()
            if changed
        }
        self._changed = {Tier.L1: {}, Tier.L2: {}}
        return changes

    def _push_down(self) -> None:
        l1, l2 = self._held[Tier.L1], self._held[Tier.L2]
        while len(l1) > self._capacity[Tier.L1]:
            key, _ = l1.popitem(last=False)
            self._changed[Tier.L1][key] = False
            if self._capacity[Tier.L2]:
                l2[key] = None
                self._changed[Tier.L2][key] = True
        while len(l2) > self._capacity[Tier.L2]:
            key, _ = l2.popitem(last=False)
            self._changed[Tier.L2][key] = False


class SimEngine:
    """Give it the time of what happens; it answers when the next thing will."""

    def __init__(self, speeds: Speeds, cache: SimCache, page_size: int) -> None:
        self.cache, self._speeds, self._page_size = cache, speeds, page_size
        self._queue: deque[Job] = deque()
        self._computing: Job | None = None
        self._decoding = 0

    def submit(self, job: Job) -> None:
        self._queue.append(job)

    def start_next(self, now: float) -> tuple[Job, float] | None:
        """Begins the next prompt, if it can; the job and the time of its first token."""
        if self._computing is not None or not self._queue or self._decoding >= self._speeds.slots:
            return None
        job = self._computing = self._queue.popleft()
        matched, below = self.cache.match(job.keys)
        job.cached_tokens = min(matched * self._page_size, job.tokens - 1)
        # Pages are kept from here on: what is used is not evicted.
        self.cache.use(job.keys[:matched])
        load_s = below * self._speeds.page_bytes / self._speeds.l2_bytes_per_s
        prefill_s = (job.tokens - job.cached_tokens) / self._speeds.prefill_tokens_per_s
        job.first_token = now + load_s + prefill_s
        return job, job.first_token

    def prefilled(self, job: Job) -> float:
        """Its first token is there; the time of its last one."""
        self._computing = None
        self._decoding += 1
        self.cache.use(job.keys)
        job.end = job.first_token + (job.output_tokens - 1) * self._speeds.tpot_s
        return job.end

    def finished(self) -> None:
        self._decoding -= 1

    def report(self) -> NothingReported:
        """What it tells routers of its load; queued prompts count without what is cached of them now."""
        ahead = sum(
            job.tokens - min(self.cache.match(job.keys)[0] * self._page_size, job.tokens - 1)
            for job in self._queue
        )
        computing = self._computing
        if computing is not None:
            ahead += computing.tokens - computing.cached_tokens
        return NothingReported(
            running=self._decoding + (computing is not None),
            waiting=len(self._queue),
            prefill_tokens=ahead,
            max_num_seqs=self._speeds.slots,
            prefill_tokens_per_s=self._speeds.prefill_tokens_per_s,
            l2_bytes_per_s=self._speeds.l2_bytes_per_s,
        )
