"""`python -m jkv.bench cached`: time to first token of new prompts against the same prompts again."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from jkv.bench.drive import Target
from jkv.bench.load import PromptShape, prompts
from jkv.bench.metrics import Record
from jkv.bench.options import TargetOptions, parse_lengths
from jkv.bench.report import Report, Row, milliseconds, number
from jkv.errors import ConfigError
from jkv.flags import flag


@dataclass(frozen=True, kw_only=True)
class CachedOptions(TargetOptions):
    """For each length, `repeats` prompts, each sent cold and then again."""

    input_lens: str = flag("512,2048,4096", group="load", metavar="N,N,...", help="prompt lengths in tokens")
    repeats: int = flag(3, group="load", minimum=1, help="prompts of each length; the medians are reported")

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_lengths(self.input_lens)

    @property
    def lengths(self) -> tuple[int, ...]:
        return parse_lengths(self.input_lens)


@dataclass(frozen=True, kw_only=True)
class CachedResults:
    """Medians in seconds over one length; `cached_tokens` is the fewest that any second run reported."""

    input_len: int
    cold_ttft: float | None
    cached_ttft: float | None
    best_cached_ttft: float | None
    speedup: float | None
    cached_tokens: int | None


def expected_cached(input_len: int, page_size: int | None) -> int:
    """The fewest tokens that a cached prompt must report: its full pages, less the one token to compute from.

    Where the page size is unknown, any hit will do.
    """
    return 1 if page_size is None else min(input_len // page_size * page_size, input_len - 1)


def check_lengths(lengths: Sequence[int], target: Target) -> None:
    """Refuse prompts that the model cannot hold, or that fill no page."""
    page_size = target.info.page_size or 2
    for length in lengths:
        target.check_fits(length + 1, f"--input-lens: {length}")
        if length < page_size:
            raise ConfigError(f"--input-lens: {length} is less than a page of {page_size} tokens")


async def run(options: CachedOptions, target: Target) -> Report:
    """Measure length by length; one pair of each goes first, so that nothing compiles later."""
    check_lengths(options.lengths, target)
    results: list[CachedResults] = []
    errors: list[str] = []
    for length in options.lengths:
        shape = PromptShape(
            input_len=length, vocab_size=target.vocab_size, seed=options.seed, series="cached"
        )
        pairs = [
            (await target.run(p, 1), await target.run(p, 1))
            for p in islice(prompts(shape), options.repeats + 1)
        ]
        errors += check_pairs(pairs, length, target.info.page_size)
        results.append(_results(length, pairs[1:]))
    return Report(results=results, rows=_rows(results), errors=errors)


def check_pairs(pairs: Sequence[tuple[Record, Record]], input_len: int, page_size: int | None) -> list[str]:
    """Why these cold and cached runs are not what they are called; a server silent on its cache fails too."""
    errors = [f"{input_len} tokens: {record.error}" for pair in pairs for record in pair if not record.ok]
    least = expected_cached(input_len, page_size)
    for cold, again in pairs:
        if not (cold.ok and again.ok):
            continue
        if cold.cached_tokens:
            errors.append(
                f"{input_len} tokens: {cold.cached_tokens} of a cold run were cached: give another --seed"
            )
        if again.cached_tokens is None:
            errors.append(f"{input_len} tokens: the target does not report cached tokens")
        elif again.cached_tokens < least:
            errors.append(
                f"{input_len} tokens: {again.cached_tokens} were cached the second time, not {least}"
            )
    return errors


def _results(input_len: int, pairs: Sequence[tuple[Record, Record]]) -> CachedResults:
    done = [(cold, again) for cold, again in pairs if cold.ok and again.ok]
    if not done:
        return CachedResults(
            input_len=input_len,
            cold_ttft=None,
            cached_ttft=None,
            best_cached_ttft=None,
            speedup=None,
            cached_tokens=None,
        )
    cold = statistics.median(pair[0].ttft for pair in done)
    again = statistics.median(pair[1].ttft for pair in done)
    counts = [pair[1].cached_tokens for pair in done if pair[1].cached_tokens is not None]
    return CachedResults(
        input_len=input_len,
        cold_ttft=cold,
        cached_ttft=again,
        best_cached_ttft=min(pair[1].ttft for pair in done),
        speedup=cold / again,
        cached_tokens=min(counts, default=None),
    )


def _rows(results: Sequence[CachedResults]) -> list[Row]:
    head = ("input tokens", "cold TTFT, ms", "cached TTFT, ms", "best cached, ms", "speedup", "cached tokens")
    return [
        head,
        *(
            (
                str(one.input_len),
                milliseconds(one.cold_ttft),
                milliseconds(one.cached_ttft),
                milliseconds(one.best_cached_ttft),
                number(one.speedup),
                "n/a" if one.cached_tokens is None else str(one.cached_tokens),
            )
            for one in results
        ),
    ]
