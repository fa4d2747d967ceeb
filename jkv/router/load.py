"""How busy an engine is: what it last said, and what was sent to it since. Pure; the clock is given.

Without the second part every request that comes before an engine's next report would go to the same one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jkv.cache.speed import Speed

# An engine's prefill speed is believed once so many reports have changed it, as their average, and until none
# has for so long. Single ones differ a lot between equal engines, and one that is thought slow gets no
# requests that could show the contrary.
_MEASUREMENTS = 100
_BELIEVED_S = 30.0
# Over how long it is averaged whether an engine has prompts to compute.
_BUSY_OVER_S = 60.0
# A report that comes this long after a request was sent counts it: the time that a request may be under way.
_UNDER_WAY_S = 0.03


class LoadReport(Protocol):
    """What an engine says of itself (`EngineLoad` of the proto). Speeds are 0 before they are measured."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def prefill_tokens(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def prefill_tokens_per_s(self) -> float: ...
    @property
    def l2_bytes_per_s(self) -> float: ...
    @property
    def l3_bytes_per_s(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class NothingReported:
    """Before an engine's first report."""

    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    max_num_seqs: int = 0
    prefill_tokens_per_s: float = 0.0
    l2_bytes_per_s: float = 0.0
    l3_bytes_per_s: float = 0.0


@dataclass(eq=False, slots=True)
class InFlight:
    """A request that an engine has. `pages` are those of its prompt, as `page_hashes` of the index."""

    pages: Sequence[int]
    prefill_tokens: int  # that it will have to compute, as far as is known
    sent_at: float
    first_token_at: float | None = None


class EngineLoads:
    """One engine's load. Owner: one thread. Times are in the clock's seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.report: LoadReport = NothingReported()
        self.chosen_at = 0  # on the chooser's own count: engines that are equal take turns
        self.sent = 0  # requests, since the start
        self._clock, self._reported_at = clock, float("-inf")
        self._in_flight: dict[InFlight, None] = {}
        self._unreported: dict[InFlight, None] = {}
        self._coming: Counter[int] = Counter()  # pages that prompts under way will leave in L1
        self._slots = Speed()
        self._measurements, self._measured_at = 0, float("-inf")
        self._prefill = 0.0  # tokens a second, averaged over the last measurements
        self._busy = 0.0  # at the last report

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def requests(self) -> int:
        """Requests that it has or will have in a moment."""
        return self.report.running + self.report.waiting + len(self._unreported)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that it has to compute before those of a new request."""
        return self.report.prefill_tokens + sum(request.prefill_tokens for request in self._unreported)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Its measured speed, 0 where that may be an accident, or is news of long ago."""
        believed = self._measurements >= _MEASUREMENTS and self._clock() - self._measured_at <= _BELIEVED_S
        return self._prefill if believed else 0.0

    @property
    def busy(self) -> float:
        """The part of the time in which it had prompts to compute, lately."""
        kept = math.exp(-(self._clock() - self._reported_at) / _BUSY_OVER_S)
        return kept * self._busy + (1 - kept) * (self.report.prefill_tokens > 0)

    @property
    def slot_s(self) -> float:
        """How long a request keeps its slot after its first token, on average; 0 before one has ended."""
        return 1 / self._slots.per_s if self._slots.per_s else 0.0

    def take(self, report: LoadReport) -> None:
        """A new report of the engine."""
        self._busy = self.busy
        self._measure(report.prefill_tokens_per_s)
        self.report, self._reported_at = report, self._clock()
        counted = [r for r in self._unreported if r.sent_at + _UNDER_WAY_S <= self._reported_at]
        for request in counted:
            del self._unreported[request]

    def _measure(self, tokens_per_s: float) -> None:
        if not tokens_per_s:
            self._measurements = 0  # another process
        elif tokens_per_s != self.report.prefill_tokens_per_s:
            self._measurements += 1
            self._measured_at = self._clock()
            self._prefill += (tokens_per_s - self._prefill) / min(self._measurements, _MEASUREMENTS)

    def send(self, pages: Sequence[int], prefill_tokens: int) -> InFlight:
        """A request goes to this engine now."""
        self.sent += 1
        request = InFlight(pages=pages, prefill_tokens=prefill_tokens, sent_at=self._clock())
        self._in_flight[request] = self._unreported[request] = None
        self._coming.update(pages)
        return request

    def first_token(self, request: InFlight) -> None:
        """Its prompt has been computed: the engine's own events tell of its pages."""
        if request.first_token_at is None and request in self._in_flight:
            request.first_token_at = self._clock()
            self._prefilled(request)

    def finish(self, request: InFlight) -> None:
        """The engine does not have it any more, for whatever reason; a second call changes nothing."""
        if request not in self._in_flight:
            return
        del self._in_flight[request]
        if request.first_token_at is None:
            self._prefilled(request)
        else:
            self._slots.record(1, self._clock() - request.first_token_at)

    def coming_pages(self, pages: Sequence[int]) -> int:
        """How many of a prompt's first pages are in prompts that the engine has not computed yet.

        Those prompts are whole, so that with a page all before it are coming too: a binary search is right.
        """
        if not pages or pages[0] not in self._coming:
            return 0
        low, high = 1, len(pages)
        while low < high:
            middle = (low + high) // 2
            if pages[middle] in self._coming:
                low = middle + 1
            else:
                high = middle
        return low

    def check(self) -> None:
        """Raises AssertionError where the bookkeeping contradicts itself."""
        assert self._unreported.keys() <= self._in_flight.keys()
        waiting = [request for request in self._in_flight if request.first_token_at is None]
        assert self._coming == Counter(page for request in waiting for page in request.pages)

    def _prefilled(self, request: InFlight) -> None:
        self._unreported.pop(request, None)
        for page in request.pages:
            left = self._coming[page] - 1
            if left:
                self._coming[page] = left
            else:
                del self._coming[page]
