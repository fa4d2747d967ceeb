"""What a router of a large cluster has in its index, hears from its engines, and is asked: made up."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jkv.api import jkv_pb2 as pb
from jkv.cache.keys import KEY_BYTES, page_keys
from jkv.cache.pages import Tier
from jkv.router.index import page_hashes
from jkv.router.load import EngineLoads, InFlight, NothingReported
from jkv.router.policy import policy
from jkv.router.routing import Prompt, Routing, Target

_ROOT = b"bench".ljust(KEY_BYTES)
_VOCAB = 49152
_PAGE_BYTES = 1_474_560  # 64 tokens of SmolLM2-135M in bfloat16
EVENT_PAGES = 1000
_TIERS = tuple(Tier)
# Of ten batches of pages, so many are in a tier of a second engine as well.
_SHARED_OF_10 = 1


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`pages` different ones over `engines` engines; `prompts` prompts of `input_len` tokens to ask for."""

    pages: int
    engines: int
    prompts: int
    input_len: int
    page_size: int
    seed: int


class Cluster:
    """A routing with a full index. A tenth of the pages are held by two engines."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.routing = Routing(policy("cache-aware"))
        self.targets = [
            Target(name=f"engine-{i}", loads=EngineLoads(time.perf_counter), page_bytes=_PAGE_BYTES)
            for i in range(shape.engines)
        ]
        self._random = np.random.default_rng(shape.seed)
        self.prompts = [
            tuple(self._random.integers(_VOCAB, size=shape.input_len).tolist()) for _ in range(shape.prompts)
        ]
        self._in_flight: list[tuple[Target, InFlight]] = []

    def fill(self) -> list[float]:
        """Take the events that an empty router would hear; returns each one's CPU seconds."""
        took = [self.hear(event, engine) for event, engine in self._prompt_events()]
        left = self.shape.pages - self.routing.index.pages
        for number in range(-(-left // EVENT_PAGES)):
            keys, engine = _keys(self.shape.seed, number), number % self.shape.engines
            took.append(self.hear(_event(_TIERS[number % len(_TIERS)], keys, b""), engine))
            if number % 10 < _SHARED_OF_10:
                took.append(self.hear(_event(Tier.L3, keys, b""), (engine + 1) % self.shape.engines))
        return took

    def churn_events(self, changes: int, first: int) -> list[tuple[bytes, int]]:
        """Events, and their engines, of that many changes: new pages, and as many of the oldest removed.

        `first` counts the events before.
        """
        half = EVENT_PAGES // 2 * KEY_BYTES
        first_pages = 18 * (self.shape.pages // EVENT_PAGES // 10)  # halves of batches that one engine has
        events = []
        for number in range(first, first + changes // EVENT_PAGES):
            which = number % first_pages
            batch = which // 2 // 9 * 10 + 1 + which // 2 % 9
            new = _keys(self.shape.seed + 1, number)[:half]
            if number < first_pages:
                old = _keys(self.shape.seed, batch)[which % 2 * half :][:half]
            else:
                old = _keys(self.shape.seed + 1, number - first_pages)[:half]
            events.append((_event(_TIERS[batch % len(_TIERS)], new, old), batch % self.shape.engines))
        return events

    def snapshot(self, pages: int) -> float:
        """CPU seconds for all pages of an engine, which are known and were cleared."""
        events = [_event(Tier.L1, _keys(self.shape.seed + 2, i), b"") for i in range(pages // EVENT_PAGES)]
        for event in events:
            self.hear(event, 0)
        self.routing.index.holder(self.targets[0].name).clear(tuple(Tier))
        return sum(self.hear(event, 0) for event in events)

    def hear(self, event: bytes, engine: int) -> float:
        """One event off the wire into the index; returns its CPU seconds."""
        start = time.thread_time()
        pages = self.routing.index.holder(self.targets[engine].name)
        for change in pb.WatchEvent.FromString(event).changes:
            pages.update(Tier(change.tier), change.added, change.removed)
        return time.thread_time() - start

    def decide(self, token_ids: Sequence[int]) -> None:
        """From token ids to an engine, which then counts the request."""
        shape = self.shape
        keys = b"".join(page_keys(_ROOT, token_ids, shape.page_size))
        prompt = Prompt(pages=page_hashes(keys), tokens=len(token_ids), page_size=shape.page_size)
        choice = self.routing.consider(self.targets, prompt)
        target = self.targets[choice.chosen]
        self._in_flight.append((target, self.routing.send(target, choice, prompt)))

    def settle(self) -> None:
        """Ends requests, so that about four of each engine wait for their first token."""
        while len(self._in_flight) > 4 * self.shape.engines:
            target, request = self._in_flight.pop(0)
            target.loads.first_token(request)
            target.loads.finish(request)

    def _prompt_events(self) -> Iterator[tuple[bytes, int]]:
        """Every engine has a part of every prompt's start; and its first report."""
        report = NothingReported(max_num_seqs=256, prefill_tokens_per_s=5000.0)
        for target in self.targets:
            target.loads.take(report)
        for number, token_ids in enumerate(self.prompts):
            keys = page_keys(_ROOT, token_ids, self.shape.page_size)
            for engine in range(self.shape.engines):
                held = b"".join(keys[: int(self._random.integers(len(keys) + 1))])
                yield _event(_TIERS[number % len(_TIERS)], held, b""), engine


def _keys(seed: int, number: int) -> bytes:
    return np.random.default_rng([seed, number]).bytes(EVENT_PAGES * KEY_BYTES)


def _event(tier: Tier, added: bytes, removed: bytes) -> bytes:
    change = pb.PageChange(tier=tier.value, added=added, removed=removed)
    return pb.WatchEvent(changes=[change]).SerializeToString()
