"""Which engine gets a request. Pure; every policy sees every engine that may get it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jkv.router.score import Candidates, EngineScore, Scores, score

# Engines that differ by no more than what it costs to compute this many pages are equally good.
_NEAR_PAGES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The scores of all candidates, which of them was chosen, and why."""

    scores: Scores
    chosen: int
    why: str

    @property
    def score(self) -> EngineScore:
        return self.scores.one(self.chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ballot:
    """What a policy chooses from; `near_s` are seconds that make no difference."""

    candidates: Candidates
    scores: Scores
    near_s: float

    def least_loaded(self, among: np.ndarray) -> int:
        """Of equally loaded ones, that which has not been chosen for the longest time."""
        loads = self.candidates.loads
        order = np.lexsort((loads.chosen_at[among], loads.requests[among], self.scores.queue_s[among]))
        return int(among[order[0]])


class Policy(Protocol):
    def __call__(self, ballot: Ballot) -> tuple[int, str]:
        """The number of a candidate, and why it is this one."""
        ...


def cache_aware(ballot: Ballot) -> tuple[int, str]:
    """The shortest expected time to the first token; of near ones, the least loaded.

    The time that its work takes from requests behind it counts as well. Without that, requests would move to
    the shortest queue whenever it is shorter by what they cost, have their prefixes computed there again, and
    others evicted for them.
    """
    costs = ballot.scores.cost_s
    near = np.flatnonzero(costs <= costs.min() + ballot.near_s)
    if len(near) > 1:
        return ballot.least_loaded(near), f"the least loaded of {len(near)} whose expected times are near"
    why = "the shortest expected time to the first token, its own and that of those behind it"
    return int(near[0]), why


def least_loaded(ballot: Ballot) -> tuple[int, str]:
    """The shortest queue, whatever is cached."""
    return ballot.least_loaded(np.arange(len(ballot.candidates.ids))), "the least loaded"


def round_robin(ballot: Ballot) -> tuple[int, str]:
    """Each in its turn."""
    return int(ballot.candidates.loads.chosen_at.argmin()), "its turn"


class RandomChoice:
    """Any."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def __call__(self, ballot: Ballot) -> tuple[int, str]:
        return self._random.randrange(len(ballot.candidates.ids)), "at random"


def policy(name: str, seed: int | None = None) -> Policy:
    """A policy by its name, one of `POLICIES`; `seed` makes `random` repeatable."""
    return RandomChoice(seed) if name == "random" else _FIXED[name]


def choose(policy: Policy, candidates: Candidates, prompt_tokens: int, page_size: int) -> Choice:
    """One of the candidates, of which there is at least one."""
    scores = score(candidates, prompt_tokens, page_size)
    near_s = _NEAR_PAGES * page_size * float(((1 + scores.behind) * scores.token_s).min())
    chosen, why = policy(Ballot(candidates=candidates, scores=scores, near_s=near_s))
    return Choice(scores=scores, chosen=chosen, why=why)


_FIXED: dict[str, Policy] = {
    "cache-aware": cache_aware,
    "least-loaded": least_loaded,
    "round-robin": round_robin,
}
POLICIES = (*_FIXED, "random")
