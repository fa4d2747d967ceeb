"""`python -m jkv.bench tiers`: what a prompt costs cold and from each tier, and how fast tiers move pages.

The tiers above the one under test are emptied before each measurement, and the server must say that the
tokens came from there: a run that was served otherwise is an error, not a figure.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from jkv.bench import machine
from jkv.bench.cache_admin import CacheAdmin
from jkv.bench.cached import check_lengths, expected_cached
from jkv.bench.load import Prompt, PromptShape, prompts
from jkv.bench.metrics import Record
from jkv.bench.report import Report, Row, milliseconds, number
from jkv.bench.tiers_engine import Engine, TiersOptions, engine

__all__ = ["TiersOptions", "engine", "run"]

_MIB = 2**20
_PASSES = 5
_COLD, _RESTART = "cold", "restart"


@dataclass(frozen=True, kw_only=True)
class LengthResults:
    """Median TTFTs in seconds by case: cold, each tier that is on, and L3 after a restart."""

    input_len: int
    ttft: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Bytes a second over the pages of one prompt of the greatest length.

    `l2_load`, from L2 to L1, is the server's own smoothed figure, since a call returns before the copy is
    done. Reads and writes between L3 and L2 are medians, the calls included.
    """

    page_bytes: int
    pages: int
    l2_load: float
    l3_read: float
    l3_write: float
    machine: machine.MachineSpeeds


@dataclass(frozen=True, kw_only=True)
class TiersResults:
    """`speeds` is None where not all tiers are on, or something failed."""

    lengths: list[LengthResults]
    speeds: Speeds | None


@dataclass(frozen=True)
class _Sample:
    input_len: int
    case: str
    record: Record
    warmup: bool
    error: str


@dataclass(frozen=True)
class _Pass:
    pages: int
    bytes: int
    l2_load: float
    read_s: float
    write_s: float


async def run(options: TiersOptions, engine: Engine) -> Report:
    """Every length in every tier, the same prompts after a restart, then the speeds."""
    check_lengths(options.lengths, engine.target)
    on = list(await engine.admin.tiers())
    supply = {length: _prompts(options, engine, length) for length in options.lengths}
    samples = [sample for each in supply.values() for sample in await _all_cases(engine, each, on)]
    if engine.can_restart and "l3" in on:
        await engine.restart()
        samples += [
            await _take(engine, prompt, _RESTART, "l3", warmup=prompt is each[0])
            for each in supply.values()
            for prompt in each
        ]
    speeds = None
    if on == ["l1", "l2", "l3"] and not any(sample.error for sample in samples):
        speeds = await _speeds(engine, supply[max(supply)][-1])
    results = TiersResults(lengths=_medians(samples), speeds=speeds)
    errors = [sample.error for sample in samples if sample.error]
    return Report(results=results, rows=_rows(results), errors=errors)


def _prompts(options: TiersOptions, engine: Engine, length: int) -> list[Prompt]:
    """One to warm up, then those to measure."""
    shape = PromptShape(
        input_len=length, vocab_size=engine.target.vocab_size, seed=options.seed, series="tiers"
    )
    return list(islice(prompts(shape), options.repeats + 1))


async def _all_cases(engine: Engine, supply: Sequence[Prompt], on: Sequence[str]) -> list[_Sample]:
    samples: list[_Sample] = []
    for prompt in supply:
        warmup = prompt is supply[0]
        samples.append(await _take(engine, prompt, _COLD, None, warmup=warmup))
        await engine.admin.drain()
        for above, tier in enumerate(on):
            if above:
                await engine.admin.flush(on[:above])
            samples.append(await _take(engine, prompt, tier, tier, warmup=warmup))
    return samples


async def _take(engine: Engine, prompt: Prompt, case: str, tier: str | None, *, warmup: bool) -> _Sample:
    record = await engine.target.run(prompt, 1)
    problem = record.error or _elsewhere(
        record, tier, expected_cached(len(prompt), engine.target.info.page_size)
    )
    error = f"{len(prompt)} tokens, {case}: {problem}" if problem else ""
    return _Sample(len(prompt), case, record, warmup, error)


def _elsewhere(record: Record, tier: str | None, expected: int) -> str:
    """Why a run was not served from this tier alone, or from none where it is None; empty if it was."""
    served = {name: count for name, count in (record.cached_by_tier or {}).items() if count}
    if tier is None:
        return f"served {served}: give another --seed" if served else ""
    return "" if served == {tier: expected} else f"served {served or 'nothing'}, not {expected} from {tier}"


def _medians(samples: Sequence[_Sample]) -> list[LengthResults]:
    times: dict[int, dict[str, list[float]]] = {}
    for sample in samples:
        cases = times.setdefault(sample.input_len, {})
        if not (sample.warmup or sample.error):
            cases.setdefault(sample.case, []).append(sample.record.ttft)
    return [
        LengthResults(input_len=length, ttft={case: statistics.median(all_) for case, all_ in cases.items()})
        for length, cases in times.items()
    ]


async def _speeds(engine: Engine, prompt: Prompt) -> Speeds | None:
    """Moves one prompt's pages between the tiers, with nothing else to do; None where they did not come."""
    passes = [await _move(engine.admin, prompt) for _ in range(_PASSES)]
    pages, amount = passes[0].pages, passes[0].bytes
    if not all(each.pages == pages > 0 and each.l2_load for each in passes):
        return None
    raw = await asyncio.to_thread(machine.measure, engine.directory, amount // pages, pages)
    return Speeds(
        page_bytes=amount // pages,
        pages=pages,
        l2_load=passes[-1].l2_load,
        l3_read=amount / statistics.median(each.read_s for each in passes),
        l3_write=amount / statistics.median(each.write_s for each in passes),
        machine=raw,
    )


async def _move(admin: CacheAdmin, prompt: Prompt) -> _Pass:
    """From L3 up to L1, then from L2 back into an empty L3."""
    await admin.flush(["l1", "l2"])
    read_s = await _timed(admin.prefetch(prompt, "l2"))
    await admin.prefetch(prompt, "l1")
    held = (await admin.tiers())["l2"]
    await admin.flush(["l1", "l3"])
    write_s = await _timed(admin.demote("l2")) + await _timed(admin.drain())
    return _Pass(held.pages, held.bytes, held.read_bytes_per_s, read_s, write_s)


async def _timed(call: Awaitable[object]) -> float:
    start = time.perf_counter()
    await call
    return time.perf_counter() - start


def _rows(results: TiersResults) -> list[Row]:
    cases = list(dict.fromkeys(case for length in results.lengths for case in length.ttft))
    rows: list[Row] = [("TTFT, ms", *cases)]
    for length in results.lengths:
        rows.append((f"{length.input_len} tokens", *(milliseconds(length.ttft.get(case)) for case in cases)))
        rows.append(("  times that from l1", *(number(_ratio(length.ttft, case)) for case in cases)))
    return rows + ([] if results.speeds is None else _speed_rows(results.speeds))


def _ratio(ttft: Mapping[str, float], case: str) -> float | None:
    return ttft[case] / ttft["l1"] if case in ttft and "l1" in ttft else None


def _speed_rows(speeds: Speeds) -> list[Row]:
    raw = speeds.machine
    pairs = [
        ("load l2 to l1, memcpy", speeds.l2_load, raw.memcpy),
        ("read l3 to l2, pread", speeds.l3_read, raw.pread),
        ("write l2 to l3, pwrite", speeds.l3_write, raw.pwrite),
        ("write l2 to l3, pwrite and fsync", speeds.l3_write, raw.pwrite_sync),
    ]
    head = ("MiB/s", "cache", "machine", "ratio")
    return [
        head,
        *((name, number(ours / _MIB), number(its / _MIB), number(ours / its)) for name, ours, its in pairs),
    ]
