"""Expected seconds to a prompt's first token, for every engine that may get it. Pure.

    queue    until the engine turns to it: prompt tokens ahead, or slots that have to become free
    load     bytes in each tier below L1 / the tier's measured speed, unless computing them is faster
    prefill  the tokens of the prompt that nobody has computed / the measured speed

What has not been measured yet, or not lately, is taken from the other engines, or from a guess, the same for
all of them. All engines are scored at once, in arrays with a place for each: 64 cost hardly more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jkv.router.load import Loads

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

Array = np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """The engines that may get a request, and how much of its prompt each of them has or will have.

    `loads` are what they have to do first. `coming_pages` are of the prompt's start, in prompts that the
    engine will have computed when it turns to this one.
    """

    ids: Sequence[str]
    loads: Loads
    matches: Array  # pages, int64 [tiers, engines], see `GlobalIndex.match`
    coming_pages: Array  # int64 [engines]
    page_bytes: Array  # int64 [engines]


class EngineScore(NamedTuple):
    """Of one engine: tokens by the tier that will serve them, and expected seconds."""

    id: str
    l1_tokens: int
    l2_tokens: int
    l3_tokens: int
    queue_s: float
    load_s: float
    prefill_s: float

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.load_s + self.prefill_s

    @property
    def cached_tokens(self) -> int:
        return self.l1_tokens + self.l2_tokens + self.l3_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Of all candidates, in their order: as `EngineScore`, float64 [engines].

    `token_s` is the time to compute one token. `behind` is how many requests are expected to be delayed by
    what the engine does for this one.
    """

    ids: Sequence[str]
    cached: Array  # tokens, int64 [tiers, engines]
    queue_s: Array
    load_s: Array
    prefill_s: Array
    token_s: Array
    behind: Array

    @property
    def cost_s(self) -> Array:
        """The time to its first token, and the time that its work takes from requests behind it."""
        return self.queue_s + (1 + self.behind) * (self.load_s + self.prefill_s)

    @property
    def cached_tokens(self) -> Array:
        return self.cached.sum(0)

    def one(self, number: int) -> EngineScore:
        l1, l2, l3 = self.cached[:, number].tolist()
        return EngineScore(
            id=self.ids[number],
            l1_tokens=l1,
            l2_tokens=l2,
            l3_tokens=l3,
            queue_s=float(self.queue_s[number]),
            load_s=float(self.load_s[number]),
            prefill_s=float(self.prefill_s[number]),
        )


class _Typical(NamedTuple):
    """Of all engines: for those that have not measured theirs, and to tell noise from difference."""

    prefill: float
    l2: float
    l3: float
    slot_s: float


def score(candidates: Candidates, prompt_tokens: int, page_size: int) -> Scores:
    """What each engine would make of a prompt, whose last token is always computed."""
    loads = candidates.loads
    typical = _typical(loads)
    speeds = _speeds(loads, typical)
    prefill, tiers = speeds[0], speeds[1:]
    cached = _cached(candidates, prompt_tokens, page_size)
    below_l1 = cached[1:]
    load_s = np.minimum(below_l1 * (candidates.page_bytes / page_size) / tiers, below_l1 / prefill)
    return Scores(
        ids=candidates.ids,
        cached=cached,
        queue_s=np.maximum(loads.prefill_tokens / prefill, _slot_wait(loads, typical.slot_s)),
        load_s=load_s.sum(0),
        prefill_s=(prompt_tokens - cached.sum(0)) / prefill,
        token_s=1 / prefill,
        behind=_behind(loads),
    )


def _typical(loads: Loads) -> _Typical:
    measured = (
        loads.prefill_tokens_per_s,
        loads.reported_tokens_per_s,
        loads.l2_bytes_per_s,
        loads.l3_bytes_per_s,
        loads.slot_s,
    )
    believed, reported, l2, l3, slot_s = _medians(np.array(measured))
    return _Typical(
        prefill=believed or reported or _PREFILL_TOKENS_PER_S,
        l2=l2 or _L2_BYTES_PER_S,
        l3=l3 or _L3_BYTES_PER_S,
        slot_s=slot_s or _SLOT_S,
    )


def _medians(values: Array) -> list[float]:
    """The lower median of each row, without what was not measured, which is 0; 0 where nothing was."""
    measured = np.count_nonzero(values, axis=1)
    return np.sort(values, axis=1)[np.arange(len(values)), -1 - measured // 2].tolist()


def _speeds(loads: Loads, typical: _Typical) -> Array:
    """Tokens of prefill, and bytes from L2 and from L3, a second: float64 [3, engines]."""
    measured = np.array((loads.prefill_tokens_per_s, loads.l2_bytes_per_s, loads.l3_bytes_per_s))
    usual = np.array((typical.prefill, typical.l2, typical.l3))[:, None]
    ratio = measured / usual
    differs = (measured > 0) & ((ratio < 1 / _ALIKE) | (ratio > _ALIKE))
    return np.where(differs, measured, usual)


def _cached(candidates: Candidates, prompt_tokens: int, page_size: int) -> Array:
    """The prompt's tokens that L1, L2 and L3 will serve, int64 [tiers, engines]."""
    # The last token is computed even if its page is a hit, which then serves one token less.
    limit = max(prompt_tokens - 1, 0)
    ends = np.minimum(candidates.matches.cumsum(0) * page_size, limit)
    coming = np.minimum(candidates.coming_pages * page_size, limit) - ends[-1]
    cached = ends.copy()
    cached[1:] -= ends[:-1]
    cached[0] += np.maximum(coming, 0)
    return cached


def _behind(loads: Loads) -> Array:
    """How many requests are expected behind one at each engine."""
    waiting = np.maximum(loads.requests - loads.running, 0)
    busy = min(float(loads.busy.mean()), _MOST_BUSY)
    anywhere = _IN_ANY_CASE + busy / (1 - busy) + _ELSEWHERE * waiting.mean()
    return anywhere + (1 - _ELSEWHERE) * waiting


def _slot_wait(loads: Loads, typical: float) -> Array:
    """Seconds until one of an engine's slots is free, behind those that wait for one already."""
    excess = np.maximum(loads.requests - loads.slots + 1, 0)
    slot_s = np.where(loads.slot_s > 0, loads.slot_s, typical)
    # Without slots it has not said how many there are.
    return np.where(loads.slots > 0, excess * slot_s / np.maximum(loads.slots, 1), 0.0)
