"""How busy an engine is: what it last said, and what was sent to it since. Pure; the clock is given.

Without the second part every request that comes before an engine's next report would go to the same one.

A choice needs the loads of all engines at once. So each keeps its own as a row of numbers, made anew when
something happens to it, and `loads_of` puts the rows together.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

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

Array = np.ndarray


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


class Loads(NamedTuple):
    """What several engines have to do before a new request, and how fast they are; float64 [engines].

    Speeds and `slot_s` are 0 where they are not known. The last two change with time alone.
    """

    requests: Array  # that it has or will have in a moment
    running: Array  # those of them that it said it computes
    prefill_tokens: Array  # of their prompts, to be computed before a new one's
    slots: Array
    slot_s: Array  # for which a request keeps its slot after its first token, on average
    chosen_at: Array  # when it was last chosen, on the chooser's own count: engines that are equal take turns
    reported_tokens_per_s: Array  # of prefill, as it last said
    l2_bytes_per_s: Array
    l3_bytes_per_s: Array
    prefill_tokens_per_s: Array  # averaged; 0 where that may be an accident, or is news of long ago
    busy: Array  # the part of the time in which it had prompts to compute, lately


# The fields of Loads but the last two, and the five that these two are made of.
_ROW = struct.Struct("14d")


class EngineLoads:
    """One engine's load. Owner: one thread. Times are in the clock's seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.sent = 0  # requests, since the start
        self._report: LoadReport = NothingReported()
        self._chosen_at = 0
        self._clock, self._reported_at = clock, float("-inf")
        self._in_flight: dict[InFlight, None] = {}
        self._unreported: dict[InFlight, None] = {}
        self._coming: Counter[int] = Counter()  # pages that prompts under way will leave in L1
        self._slots = Speed()
        self._measurements, self._measured_at = 0, float("-inf")
        self._prefill = 0.0  # tokens a second, averaged over the last measurements
        self._busy = 0.0  # at the last report
        self._row = self._packed()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def take(self, report: LoadReport) -> None:
        """A new report of the engine."""
        now = self._clock()
        self._busy = float(_busy(now - self._reported_at, self._busy, self._report.prefill_tokens > 0))
        self._measure(report.prefill_tokens_per_s)
        self._report, self._reported_at = report, now
        counted = [r for r in self._unreported if r.sent_at + _UNDER_WAY_S <= now]
        for request in counted:
            del self._unreported[request]
        self._row = self._packed()

    def _measure(self, tokens_per_s: float) -> None:
        if not tokens_per_s:
            self._measurements = 0  # another process
        elif tokens_per_s != self._report.prefill_tokens_per_s:
            self._measurements += 1
            self._measured_at = self._clock()
            self._prefill += (tokens_per_s - self._prefill) / min(self._measurements, _MEASUREMENTS)

    def send(self, pages: Sequence[int], prefill_tokens: int, turn: int) -> InFlight:
        """A request goes to this engine now; `turn` is the chooser's count of those that it has sent."""
        self.sent += 1
        self._chosen_at = turn
        request = InFlight(pages=pages, prefill_tokens=prefill_tokens, sent_at=self._clock())
        self._in_flight[request] = self._unreported[request] = None
        self._coming.update(pages)
        self._row = self._packed()
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
            self._row = self._packed()

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
        assert self._row == self._packed()
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
        self._row = self._packed()

    def _packed(self) -> bytes:
        report, unreported = self._report, self._unreported
        return _ROW.pack(
            report.running + report.waiting + len(unreported),
            report.running,
            report.prefill_tokens + sum([request.prefill_tokens for request in unreported]),
            report.max_num_seqs,
            1 / self._slots.per_s if self._slots.per_s else 0.0,
            self._chosen_at,
            report.prefill_tokens_per_s,
            report.l2_bytes_per_s,
            report.l3_bytes_per_s,
            self._prefill if self._measurements >= _MEASUREMENTS else 0.0,
            self._measured_at,
            self._busy,
            report.prefill_tokens > 0,
            self._reported_at,
        )


def loads_of(engines: Sequence[EngineLoads]) -> Loads:
    """The loads of these engines, at least one, that have one clock, now."""
    now = engines[0]._clock()
    rows = np.frombuffer(b"".join([engine._row for engine in engines])).reshape(len(engines), -1)
    *known, tokens_per_s, measured_at, busy, computes, reported_at = rows.T
    believed = np.where(now - measured_at <= _BELIEVED_S, tokens_per_s, 0.0)
    return Loads(*known, prefill_tokens_per_s=believed, busy=_busy(now - reported_at, busy, computes))


def _busy(passed_s: Any, before: Any, computes: Any) -> Any:
    """The part of the time with prompts to compute, so long after it was `before`; of engines, or of one."""
    kept = np.exp(-passed_s / _BUSY_OVER_S)
    return kept * before + (1 - kept) * computes
