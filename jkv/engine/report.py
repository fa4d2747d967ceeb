"""The log's view of a working engine, from snapshots of what it counts. Pure: no clock, no I/O."""

from __future__ import annotations

from jkv.cache.l1 import L1Counts
from jkv.engine.stats import EngineStats


class ActivityReport:
    """One line for every `every_s` seconds of work; time without work counts for nothing."""

    def __init__(self, stats: EngineStats, *, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._before = stats
        self._clock = 0.0
        self._busy_s = 0.0

    def resume(self, now: float) -> None:
        """Work starts again at `now`, in seconds of a clock that never goes back."""
        self._clock = now

    def observe(self, stats: EngineStats, now: float) -> str | None:
        """Work went on until `now`; returns the line about the seconds since the last one when it is due."""
        self._busy_s += now - self._clock
        self._clock = now
        if self._busy_s < self._every_s:
            return None
        line = describe(self._before, stats, self._busy_s)
        self._before, self._busy_s = stats, 0.0
        return line


def describe(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """What runs now, and the speed and the hit rate over the `seconds` between two snapshots.

    A prompt counts in full, its cached tokens included, once its first token is there.
    """
    prompt = now.prompt_tokens - before.prompt_tokens
    generated = now.generated_tokens - before.generated_tokens
    hit_rate = f"{(now.cached_tokens - before.cached_tokens) / prompt:.1%}" if prompt else "-"
    parts = [
        f"running {now.running}",
        f"waiting {now.waiting}",
        f"prompt {prompt / seconds:.1f} tokens/s",
        f"generated {generated / seconds:.1f} tokens/s",
        describe_l1(now.l1),
        f"hit rate {hit_rate}",
    ]
    if preemptions := now.preemptions - before.preemptions:
        parts.append(f"preempted {preemptions}")
    return ", ".join(parts)


def describe_l1(counts: L1Counts) -> str:
    """The pages by state."""
    return f"L1 {counts.in_use} pages in use + {counts.cached} cached + {counts.free} free = {counts.total}"
