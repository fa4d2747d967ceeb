"""From a prompt's pages to an engine: the index, what was just sent, and a policy, put together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jkv.router.index import GlobalIndex
from jkv.router.load import EngineLoads, InFlight, loads_of
from jkv.router.policy import Choice, Policy, choose
from jkv.router.score import Candidates


class Target(NamedTuple):
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
        names = [target.name for target in targets]
        shared = {target.name: target.shared_l3 for target in targets if target.shared_l3}
        pages = prompt.pages.tolist()
        candidates = Candidates(
            ids=names,
            loads=loads_of([target.loads for target in targets]),
            matches=self.index.match(prompt.pages, names, shared),
            coming_pages=np.array([target.loads.coming_pages(pages) for target in targets]),
            page_bytes=np.array([target.page_bytes for target in targets]),
        )
        return choose(self._policy, candidates, prompt.tokens, prompt.page_size)

    def send(self, target: Target, choice: Choice, prompt: Prompt) -> InFlight:
        """The chosen engine gets the prompt now; give what this returns to its loads later on."""
        self._turn += 1
        prefill_tokens = prompt.tokens - choice.score.cached_tokens
        return target.loads.send(prompt.pages.tolist(), prefill_tokens, self._turn)
