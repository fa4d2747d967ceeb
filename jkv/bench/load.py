"""What a benchmark sends and when: seeded prompts of token ids, seeded Poisson arrivals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jkv.errors import ConfigError

Prompt = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PromptShape:
    """Prompts of `input_len` uniformly random ids below `vocab_size`, the first `prefix_len` common to all.

    With `same_prompt` every prompt is equal. Shapes of one seed that differ in `series` or `input_len` share
    nothing but the prefix.
    """

    input_len: int
    vocab_size: int
    seed: int
    prefix_len: int = 0
    same_prompt: bool = False
    series: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.prefix_len < self.input_len:
            raise ConfigError(
                f"--prefix-len {self.prefix_len}: must be at least 0 and below --input-len {self.input_len}"
                " (use --same-prompt for equal prompts)"
            )


def prompts(shape: PromptShape) -> Iterator[Prompt]:
    """An endless supply, always in the same order."""
    prefix = _rng(shape.seed, "prefix").integers(shape.vocab_size, size=shape.prefix_len).tolist()
    suffixes = _rng(shape.seed, "suffix", shape.series, str(shape.input_len))
    prompt: Prompt = ()
    while True:
        if not (prompt and shape.same_prompt):
            suffix = suffixes.integers(shape.vocab_size, size=shape.input_len - shape.prefix_len).tolist()
            prompt = (*prefix, *suffix)
        yield prompt


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which `count` requests arrive, `rate` a second on average; the first is 0."""
    gaps = _rng(seed, "arrival").exponential(1.0 / rate, size=count)
    return (np.cumsum(gaps) - gaps[:1]).tolist()


def _rng(seed: int, *purpose: str) -> np.random.Generator:
    """A generator of its own for each purpose, so that drawing more for one never shifts another."""
    return np.random.default_rng([seed, *"/".join(purpose).encode()])
