"""Engines that may get a request, one by one, and what each would make of it: the formula as it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jkv.router.load import Loads
from jkv.router.score import Candidates

SPEEDS = ("prefill_tokens_per_s", "reported_tokens_per_s", "l2_bytes_per_s", "l3_bytes_per_s")
_GUESSES = {
    "reported_tokens_per_s": 2000.0,
    "l2_bytes_per_s": 2.0**32,
    "l3_bytes_per_s": 2.0**30,
    "slot_s": 1.0,
}


class Engine(NamedTuple):
    """As `Candidates` and `Loads` have many; pages of the prompt by tier, and `coming` ones."""

    id: str
    l1: int = 0
    l2: int = 0
    l3: int = 0
    coming: int = 0
    page_bytes: int = 2**20
    requests: int = 0
    running: int = 0
    prefill_tokens: int = 0
    slots: int = 8
    slot_s: float = 0.0
    chosen_at: int = 0
    reported_tokens_per_s: float = 1000.0
    l2_bytes_per_s: float = 1000.0 * 2**20
    l3_bytes_per_s: float = 100.0 * 2**20
    prefill_tokens_per_s: float = 1000.0
    busy: float = 0.0


def candidates(engines: Sequence[Engine]) -> Candidates:
    rows = [[getattr(engine, field) for engine in engines] for field in Loads._fields]
    return Candidates(
        ids=[engine.id for engine in engines],
        loads=Loads(*np.array(rows, np.float64)),
        matches=np.array([[engine.l1, engine.l2, engine.l3] for engine in engines]).T,
        coming_pages=np.array([engine.coming for engine in engines]),
        page_bytes=np.array([engine.page_bytes for engine in engines]),
    )


class Expected(NamedTuple):
    """As one place of `Scores`."""

    cached: list[int]
    queue_s: float
    load_s: float
    prefill_s: float
    token_s: float
    behind: float


def expected(engine: Engine, engines: Sequence[Engine], prompt_tokens: int, page_size: int) -> Expected:
    """The score of one of these engines."""
    prefill = _speed(engine, engines, "prefill_tokens_per_s")
    ends = [min(pages * page_size, prompt_tokens - 1) for pages in (engine.l1, engine.l1 + engine.l2)]
    ends.append(min((engine.l1 + engine.l2 + engine.l3) * page_size, prompt_tokens - 1))
    coming = max(min(engine.coming * page_size, prompt_tokens - 1) - ends[2], 0)
    cached = [ends[0] + coming, ends[1] - ends[0], ends[2] - ends[1]]
    load_s = 0.0
    for tokens, field in ((cached[1], "l2_bytes_per_s"), (cached[2], "l3_bytes_per_s")):
        size = tokens * engine.page_bytes / page_size
        load_s += min(size / _speed(engine, engines, field), tokens / prefill)
    slot_s = engine.slot_s or _typical(engines, "slot_s")
    excess = max(engine.requests - engine.slots + 1, 0)
    busy = min(sum(one.busy for one in engines) / len(engines), 0.9)
    waiting = sum(map(_waiting, engines)) / len(engines)
    return Expected(
        cached=cached,
        queue_s=max(engine.prefill_tokens / prefill, excess * slot_s / engine.slots if engine.slots else 0.0),
        load_s=load_s,
        prefill_s=(prompt_tokens - sum(cached)) / prefill,
        token_s=1 / prefill,
        behind=2 + busy / (1 - busy) + 0.25 * waiting + 0.75 * _waiting(engine),
    )


def _waiting(engine: Engine) -> int:
    return max(engine.requests - engine.running, 0)


def _typical(engines: Sequence[Engine], field: str) -> float:
    measured = sorted(value for engine in engines if (value := getattr(engine, field)) > 0)
    if measured:
        return measured[(len(measured) - 1) // 2]
    return _typical(engines, "reported_tokens_per_s") if field == "prefill_tokens_per_s" else _GUESSES[field]


def _speed(engine: Engine, engines: Sequence[Engine], field: str) -> float:
    measured, typical = getattr(engine, field), _typical(engines, field)
    return measured if measured > 0 and not 0.5 <= measured / typical <= 2 else typical
