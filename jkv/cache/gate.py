"""The cost gate of `--load-policy auto`: whether loading pages is faster than computing them.

No I/O; the clock is injected. Owner: the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from jkv.cache.pages import Source
from jkv.cache.speed import LinearCost, Speed

PROBE_AFTER_S = 30.0  # a tier's figures are this old at most while its loads are gated


class CostGate:
    """Compares each tier's measured load times with the measured speed of prefill.

    What has not been measured is loaded. A tier whose loads are gated measures nothing, so one load is let
    through now and then; what it shows replaces what was known.
    """

    def __init__(self, *, page_size: int, clock: Callable[[], float]) -> None:
        self.gated = 0  # loads that were not worth it
        self._page_size, self._clock = page_size, clock
        self._loads: dict[Source, LinearCost] = {}  # by pages
        self._measured_at: dict[Source, float] = {}  # or probed at
        self._probed: set[Source] = set()  # the next measurement is a probe's
        self._prefill = Speed()

    @property
    def prefill_tokens_per_s(self) -> float:
        """0 before the first measurement."""
        return self._prefill.per_s

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """A step that computed prompt tokens and nothing else."""
        self._prefill.record(tokens, seconds)

    def record_load(self, tier: Source, pages: int, seconds: float) -> None:
        """A load of at least one page, from the request for it until its last page could be used."""
        if tier not in self._loads or tier in self._probed:
            self._loads[tier] = LinearCost()
        self._probed.discard(tier)
        self._loads[tier].record(pages, seconds)
        self._measured_at[tier] = self._clock()

    def load_pages_per_s(self, tier: Source) -> float:
        """The speed of a long load; 0 while unmeasured."""
        cost = self._loads.get(tier)
        return cost.per_s if cost else 0.0

    def load_seconds(self, tier: Source, pages: int) -> float:
        """The expected time to load; 0 while unmeasured."""
        cost = self._loads.get(tier)
        return cost.seconds(pages) if cost else 0.0

    def worth_loading(self, tier: Source, pages: int) -> bool:
        """Whether to load a run of pages; False counts as a gated load. At True the load must be made."""
        compute_tokens_per_s = self._prefill.per_s
        if tier not in self._loads or compute_tokens_per_s == 0:
            return True
        if self.load_seconds(tier, pages) <= pages * self._page_size / compute_tokens_per_s:
            return True
        now = self._clock()
        if now - self._measured_at[tier] >= PROBE_AFTER_S:
            self._measured_at[tier] = now  # one probe, not one for each request that comes now
            self._probed.add(tier)
            return True
        self.gated += 1
        return False
