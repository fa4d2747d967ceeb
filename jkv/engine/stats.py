"""What the engine counts."""

from __future__ import annotations

from dataclasses import dataclass

from jkv.cache.l1 import L1Counts


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot, taken after a step. Token counts and the counts of events are totals since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    evictions: int = 0
    running: int = 0
    waiting: int = 0
    l1: L1Counts
