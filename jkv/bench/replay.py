"""Sends prompts through the engine's own scheduler and cache bookkeeping, with pages of no content. No jax.

A block of a trace is a page here, of two tokens that are both its id: so the keys, the lookups, the evictions
and what moves between the tiers are those of a server, and only computing and copying are left out.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jkv.bench.trace_file import BLOCK_TOKENS, TraceRequest
from jkv.cache.disk_tier import DiskTier
from jkv.cache.gate import CostGate
from jkv.cache.host_tier import HostTier
from jkv.cache.keys import request_root
from jkv.cache.l1 import L1Pool
from jkv.cache.l3.listing import Listing
from jkv.cache.l3.names import StoredPage, page_of
from jkv.cache.l3.store import ReadOutcome, WriteOutcome
from jkv.cache.lookup import Policy
from jkv.cache.lower import LowerTiers
from jkv.cache.pages import PageInfo, Tier
from jkv.engine.request import EngineRequest, FinishReason, SamplingParams
from jkv.engine.scheduler import Limits, Scheduler
from jkv.engine.sequence import Sequence

PAGE_SIZE = 2  # a page of one token would be lost to the last token of a prompt, which is always computed
_STEP_PAGES = 8
_NOTHING = np.zeros(1, np.uint8)
_SAMPLING = SamplingParams(max_tokens=1)


class NullStore:
    """An L3 that answers at once and keeps nothing: a page costs one byte of capacity."""

    owner, page_cost, overhead_bytes = "null", 1, 0

    def read(
        self, page: StoredPage, info: PageInfo, done: Callable[[ReadOutcome], None]
    ) -> Callable[[], None]:
        done(ReadOutcome(page, _NOTHING, None, 0.0))
        return lambda: None

    def write(
        self, info: PageInfo, data: Callable[[], np.ndarray], done: Callable[[WriteOutcome], None]
    ) -> None:
        done(WriteOutcome(page_of("trace", "", info), None, 0.0, 0))

    def delete(self, page: StoredPage, done: Callable[[bool], None] | None) -> None:
        if done is not None:
            done(True)

    def quarantine(self, page: StoredPage, done: Callable[[bool], None] | None = None) -> None:
        pass

    def save_recency(self, keys: Iterable[bytes]) -> None:
        pass

    def close(self) -> None:
        pass


class _NullCodec:
    def page_to_bytes(self, payload: Any) -> np.ndarray:
        return payload

    def page_from_bytes(self, data: np.ndarray) -> Any:
        return data


class Replay:
    """A cache with so many pages in each tier; 0 turns L2 or L3 off. One request at a time."""

    def __init__(self, *, l1: int, l2: int, l3: int) -> None:
        self._pool = L1Pool(l1, PAGE_SIZE)
        self._posted: deque[Callable[[], None]] = deque()
        self._lower = self._tiers(l2, l3) if l2 else LowerTiers.none(self._pool)
        limits = Limits(max_num_seqs=1, max_batched_tokens=_STEP_PAGES * PAGE_SIZE, max_mixed_tokens=1)
        self._scheduler = Scheduler(self._pool, limits, self._lower)
        self._root = request_root(b"trace")
        self._numbers = itertools.count()

    def serve(self, request: TraceRequest) -> Mapping[Tier, int]:
        """Runs a request to its end; returns the prompt tokens that each tier served."""
        tokens = [token for block in request.full_ids for token in (block, block)]
        if request.input_length % BLOCK_TOKENS:
            tokens.append(0)  # the last block is not full: its page is not shared
        number = next(self._numbers)
        asked = EngineRequest(request_id=str(number), prompt_ids=tuple(tokens), sampling=_SAMPLING)
        seq = Sequence(request=asked, root=self._root, arrival=number)
        self._scheduler.add(seq)
        while not seq.unread:
            self._turn()
        self._scheduler.commit(seq, 0)
        self._scheduler.finish(seq, FinishReason.LENGTH)
        # The last token counts as computed even if its page was a hit: that page has one token less.
        return {Tier(tier): request.tokens_of(-(-count // PAGE_SIZE)) for tier, count in seq.cached.items()}

    def check(self) -> None:
        """Raises AssertionError where the bookkeeping contradicts itself."""
        self._scheduler.check()

    def _turn(self) -> None:
        """What the engine's loop does around a step."""
        while self._posted:
            self._posted.popleft()()
        self._scheduler.schedule()
        lower = self._lower
        for offer in lower.take_leaving():
            lower.saved(offer, _NOTHING)
        self._scheduler.take_restores()
        for offer in lower.choose(self._scheduler.take_offers()):
            lower.saved(offer, _NOTHING)

    def _tiers(self, l2: int, l3: int) -> LowerTiers:
        nothing = Listing(own=[], foreign=[], stale=[])
        disk = DiskTier(NullStore(), nothing, l3, _NullCodec(), self._posted.append) if l3 else None
        return LowerTiers(
            self._pool,
            HostTier(l2, keep=True),
            disk,
            gate=CostGate(page_size=PAGE_SIZE, clock=time.monotonic),
            policy=Policy(load="always"),
            post=self._posted.append,
        )
