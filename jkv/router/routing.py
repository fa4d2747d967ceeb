"""From a prompt's pages to an engine: the index, what was just sent, and a policy, put together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jkv.router.index import GlobalIndex, Match
from jkv.router.load import EngineLoads, InFlight
from jkv.router.policy import Choice, Policy, choose
from jkv.router.score import Candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """An engine that may get a request; `name` is its holder's in the index."""

    name: str
    loads: EngineLoads
    page_bytes: int
    shared_l3: tuple[str, ...] = ()  # holders whose L3 pages it can read too


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """`pages` are its full ones, as `page_hashes` of the index."""

    pages: np.ndarray
    tokens: int
    page_size: int


class Routing:
    """Chooses engines. Owner: one thread."""

    def __init__(self, policy: Policy) -> None:
        self.index = GlobalIndex()
        self._policy = policy
        self._turn = 0

    def consider(self, targets: Sequence[Target], prompt: Prompt) -> Choice:
        """Which of these engines, at least one, would get this prompt now; changes nothing but the policy."""
        shared = {target.name: target.shared_l3 for target in targets if target.shared_l3}
        matches = self.index.match(prompt.pages, [target.name for target in targets], shared)
        pages = prompt.pages.tolist()
        candidates = [_candidate(target, matches[target.name], pages) for target in targets]
        return choose(self._policy, candidates, prompt.tokens, prompt.page_size)

    def send(self, target: Target, choice: Choice, prompt: Prompt) -> InFlight:
        """The chosen engine gets the prompt now; give what this returns to its loads later on."""
        self._turn += 1
        target.loads.chosen_at = self._turn
        return target.loads.send(prompt.pages.tolist(), prompt.tokens - choice.score.cached_tokens)


def _candidate(target: Target, match: Match, pages: Sequence[int]) -> Candidate:
    loads = target.loads
    return Candidate(
        id=target.name,
        report=loads.report,
        requests=loads.requests,
        prefill_tokens=loads.prefill_tokens,
        slot_s=loads.slot_s,
        chosen_at=loads.chosen_at,
        match=match,
        coming_pages=loads.coming_pages(pages),
        prefill_tokens_per_s=loads.prefill_tokens_per_s,
        busy=loads.busy,
        page_bytes=target.page_bytes,
    )
