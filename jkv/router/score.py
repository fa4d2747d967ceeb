"""Expected seconds to a prompt's first token, for every engine that may get it. Pure.

    queue    until the engine turns to it: prompt tokens ahead, or slots that have to become free
    load     bytes in each tier below L1 / the tier's measured speed, unless computing them is faster
    prefill  the tokens of the prompt that nobody has computed / the measured speed

What has not been measured yet, or not lately, is taken from the other engines, or from a guess, the same for
all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jkv.router.index import Match
from jkv.router.load import LoadReport

# Before anything was measured anywhere; only how they compare matters then.
_PREFILL_TOKENS_PER_S = 2000.0
_L2_BYTES_PER_S = 4 * 2.0**30
_L3_BYTES_PER_S = 2.0**30
_SLOT_S = 1.0
# How many requests are expected at an engine after this one: as many as wait there now, this part of those
# that wait elsewhere, and these in any case. Chosen by `python -m jkv.bench cluster`: without all that hits
# fell to 0.55 of the ideal near saturation, from 0.96. With more of those that wait elsewhere, requests for
# one hot prefix would wait where it is while other engines are idle.
_ELSEWHERE = 0.25
_IN_ANY_CASE = 2
# And b / (1 - b) of those that come before it is idle again, where engines compute for the part b of the
# time: for each request that starts a queue's busy period so many join it (Kleinrock 1975); up to this part.
# Without them Mooncake's conversation trace had 0.88 of its ideal hits at 0.8 of the capacity; with them it
# has 0.95, and no higher TTFTs.
_MOST_BUSY = 0.9
# Speeds closer than this to the median are the median: so much do measurements of equal machines differ;
# a few percent would otherwise send every request to the same one.
_ALIKE = 2.0


class Candidate(NamedTuple):
    """An engine that may get a request, and how much of its prompt the engine has or will have.

    `requests` and `prefill_tokens` are what it has to do first (`jkv.router.load`). `coming_pages` are of the
    prompt's start, in prompts that the engine will have computed when it turns to this one. Its speed of
    prefill is 0 where what it reports is not to be believed yet; `busy` is the part of the time in which it
    computes prompts.
    """

    id: str
    report: LoadReport
    requests: int
    prefill_tokens: int
    slot_s: float  # for which a request keeps its slot; 0 if unknown
    chosen_at: int  # when it was last chosen, on any count
    match: Match
    page_bytes: int
    coming_pages: int = 0
    prefill_tokens_per_s: float = 0.0
    busy: float = 0.0


class EngineScore(NamedTuple):
    """Tokens by the tier that will serve them, and expected seconds; `token_s` is that of computing one.

    `behind` is how many requests are expected to be delayed by what it does for this one.
    """

    id: str
    l1_tokens: int
    l2_tokens: int
    l3_tokens: int
    queue_s: float
    load_s: float
    prefill_s: float
    token_s: float
    behind: float

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.load_s + self.prefill_s

    @property
    def cost_s(self) -> float:
        """The time to its first token, and the time that its work takes from requests behind it."""
        return self.queue_s + (1 + self.behind) * (self.load_s + self.prefill_s)

    @property
    def cached_tokens(self) -> int:
        return self.l1_tokens + self.l2_tokens + self.l3_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fleet:
    """Typical speeds, for engines that have not measured theirs, and to tell noise from difference; and how
    many requests are expected behind one at any engine, beside those that wait there.
    """

    prefill: float
    l2: float
    l3: float
    slot_s: float
    behind: float


def score(candidates: Sequence[Candidate], prompt_tokens: int, page_size: int) -> list[EngineScore]:
    """What each engine would make of a prompt, whose last token is always computed."""
    fleet = _fleet(candidates)
    return [_score(candidate, prompt_tokens, page_size, fleet) for candidate in candidates]


def _fleet(candidates: Sequence[Candidate]) -> _Fleet:
    reports = [candidate.report for candidate in candidates]
    reported = _typical([report.prefill_tokens_per_s for report in reports], _PREFILL_TOKENS_PER_S)
    waiting = sum(map(_waiting, candidates)) / len(candidates)
    busy = min(sum([candidate.busy for candidate in candidates]) / len(candidates), _MOST_BUSY)
    return _Fleet(
        prefill=_typical([candidate.prefill_tokens_per_s for candidate in candidates], reported),
        l2=_typical([report.l2_bytes_per_s for report in reports], _L2_BYTES_PER_S),
        l3=_typical([report.l3_bytes_per_s for report in reports], _L3_BYTES_PER_S),
        slot_s=_typical([candidate.slot_s for candidate in candidates], _SLOT_S),
        behind=_IN_ANY_CASE + busy / (1 - busy) + _ELSEWHERE * waiting,
    )


def _typical(values: Iterable[float], guess: float) -> float:
    """The lower median of what was measured."""
    measured = sorted([value for value in values if value > 0])
    return measured[(len(measured) - 1) // 2] if measured else guess


def _speed(measured: float, typical: float) -> float:
    return measured if measured > 0 and not 1 / _ALIKE <= measured / typical <= _ALIKE else typical


def _score(candidate: Candidate, prompt_tokens: int, page_size: int, fleet: _Fleet) -> EngineScore:
    prefill = _speed(candidate.prefill_tokens_per_s, fleet.prefill)
    l1, l2, l3 = _cached(candidate, prompt_tokens, page_size)
    token_bytes = candidate.page_bytes / page_size
    load_s = 0.0
    if l2:
        load_s += min(l2 * token_bytes / _speed(candidate.report.l2_bytes_per_s, fleet.l2), l2 / prefill)
    if l3:
        load_s += min(l3 * token_bytes / _speed(candidate.report.l3_bytes_per_s, fleet.l3), l3 / prefill)
    return EngineScore(
        id=candidate.id,
        l1_tokens=l1,
        l2_tokens=l2,
        l3_tokens=l3,
        queue_s=max(candidate.prefill_tokens / prefill, _slot_wait(candidate, fleet)),
        load_s=load_s,
        prefill_s=(prompt_tokens - l1 - l2 - l3) / prefill,
        token_s=1 / prefill,
        behind=fleet.behind + (1 - _ELSEWHERE) * _waiting(candidate),
    )


def _cached(candidate: Candidate, prompt_tokens: int, page_size: int) -> tuple[int, int, int]:
    """The prompt's tokens that L1, L2 and L3 will serve."""
    match = candidate.match
    if not match.pages and not candidate.coming_pages:
        return 0, 0, 0
    # The last token is computed even if its page is a hit, which then serves one token less.
    limit = max(prompt_tokens - 1, 0)
    l1_end = min(match.l1 * page_size, limit)
    l2_end = min((match.l1 + match.l2) * page_size, limit)
    l3_end = min(match.pages * page_size, limit)
    coming = min(candidate.coming_pages * page_size, limit) - l3_end
    return l1_end + max(coming, 0), l2_end - l1_end, l3_end - l2_end


def _waiting(candidate: Candidate) -> int:
    return max(candidate.requests - candidate.report.running, 0)


def _slot_wait(candidate: Candidate, fleet: _Fleet) -> float:
    """Seconds until one of the engine's slots is free, behind those that wait for one already."""
    slots = candidate.report.max_num_seqs
    excess = candidate.requests - slots + 1
    if not slots or excess <= 0:
        return 0.0
    return excess * (candidate.slot_s or fleet.slot_s) / slots
