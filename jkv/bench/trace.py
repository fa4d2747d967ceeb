"""`python -m jkv.bench trace`: a recorded load through the engine's own lookup and eviction code.

Requests come one after the other, at the order of the file. What each tier serves is put beside a plain LRU
list of the same capacity and an infinite cache, both of which share partly filled blocks too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jkv.bench.options import ReportOptions
from jkv.bench.replay import Replay
from jkv.bench.report import Report, Row, number
from jkv.bench.trace_file import TraceRequest, ideal_hit_tokens, lru_hit_tokens, read_trace
from jkv.errors import ConfigError
from jkv.flags import flag

_LOAD = "load"


@dataclass(frozen=True, kw_only=True)
class TraceOptions(ReportOptions):
    """Every capacity is that of the tier under test; those above it are as small as they can be."""

    file: str = flag(
        "", group=_LOAD, metavar="FILE", default_text="none, required", help="a trace in Mooncake's format"
    )
    capacities: str = flag(
        "1000,3000,10000,30000,inf", group=_LOAD, metavar="N,N,...", help="capacities in blocks, or inf"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.file:
            raise ConfigError("--file: needed, a trace in Mooncake's format")
        for part in self.capacities.split(","):
            if part.strip() != "inf" and not (part.strip().isdecimal() and int(part) > 0):
                raise ConfigError(
                    f"--capacities {self.capacities}: {part!r} is not a number of blocks or inf"
                )

    @property
    def blocks(self) -> tuple[int | None, ...]:
        """None is an infinite capacity."""
        parts = [part.strip() for part in self.capacities.split(",")]
        return tuple(None if part == "inf" else int(part) for part in parts)


@dataclass(frozen=True, kw_only=True)
class CapacityResults:
    """Hit rates: prompt tokens served over prompt tokens.

    `by_tier` has the rate of a cache whose lowest tier is the named one and has this capacity; None where it
    could not hold the longest prompt. `plain_lru` is that of a plain list.
    """

    capacity: int | None  # None is infinite
    plain_lru: float
    by_tier: Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class TraceResults:
    """`upper_pages` is what L1, or L1 and L2 each, have above the tier under test."""

    requests: int
    prompt_tokens: int
    distinct_blocks: int
    upper_pages: int
    ideal: float
    capacities: list[CapacityResults]
    cpu_microseconds_per_block: float  # of all that a request costs but computing and copying


def run(options: TraceOptions) -> Report:
    """Replay the trace once for each capacity and tier."""
    requests = read_trace(Path(options.file))
    total = sum(request.input_length for request in requests)
    longest = max(len(request.hash_ids) for request in requests)
    distinct = len({block for request in requests for block in request.hash_ids})
    upper = 2 * (longest + 1)  # half of L2 is for what is on its way up
    capacities: list[CapacityResults] = []
    spent, blocks = 0.0, 0
    for capacity in options.blocks:
        size = capacity or distinct + upper
        by_tier: dict[str, float | None] = {}
        for tier, shape in _shapes(size, upper, longest + 1).items():
            started = time.thread_time()
            by_tier[tier] = None if shape is None else _hit_tokens(requests, shape) / total
            spent += time.thread_time() - started
            blocks += 0 if shape is None else sum(len(request.hash_ids) for request in requests)
        plain = lru_hit_tokens(requests, size) / total
        capacities.append(CapacityResults(capacity=capacity, plain_lru=plain, by_tier=by_tier))
    results = TraceResults(
        requests=len(requests),
        prompt_tokens=total,
        distinct_blocks=distinct,
        upper_pages=upper,
        ideal=ideal_hit_tokens(requests) / total,
        capacities=capacities,
        cpu_microseconds_per_block=spent / max(blocks, 1) * 1e6,
    )
    return Report(results=results, rows=_rows(results), errors=[])


def _shapes(size: int, upper: int, least: int) -> dict[str, tuple[int, int, int] | None]:
    """Pages of L1, L2 and L3 that put each tier to the test."""
    return {
        "l1": (size, 0, 0) if size >= least else None,
        "l2": (upper, size, 0),
        "l3": (upper, upper, size),
    }


def _hit_tokens(requests: Sequence[TraceRequest], shape: tuple[int, int, int]) -> int:
    l1, l2, l3 = shape
    replay = Replay(l1=l1, l2=l2, l3=l3)
    hits = sum(sum(replay.serve(request).values()) for request in requests)
    replay.check()
    return hits


def _rows(results: TraceResults) -> list[Row]:
    rows: list[Row] = [("hit rate by capacity, blocks", "plain LRU", "l1", "l2", "l3")]
    for each in results.capacities:
        name = "infinite" if each.capacity is None else str(each.capacity)
        rows.append((name, _percent(each.plain_lru), *(_percent(rate) for rate in each.by_tier.values())))
    return [
        *rows,
        ("ideal", _percent(results.ideal)),
        ("requests", str(results.requests)),
        ("distinct blocks", str(results.distinct_blocks)),
        ("pages of each tier above the one under test", str(results.upper_pages)),
        ("CPU microseconds a block", number(results.cpu_microseconds_per_block)),
    ]


def _percent(rate: float | None) -> str:
    return "n/a" if rate is None else f"{rate:.2%}"
