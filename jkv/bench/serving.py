"""`python -m jkv.bench serving`: many requests; latency, throughput, hit rate, goodput."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from jkv.bench.drive import Target, closed_loop, open_loop
from jkv.bench.load import Prompt, PromptShape, poisson_arrivals, prompts
from jkv.bench.metrics import Record, Summary, prefill_rate, summarize
from jkv.bench.options import TargetOptions
from jkv.bench.report import Report, Row, number, spread_row
from jkv.bench.slo import Slo, parse_slo
from jkv.flags import flag

_LOAD = "load"


def parse_rate(text: str) -> float | None:
    """Requests per second above 0; None for `inf`.

    Raises:
        ValueError: anything else.
    """
    rate = float(text)
    if not rate > 0:
        raise ValueError("must be greater than 0, or inf")
    return None if math.isinf(rate) else rate


@dataclass(frozen=True, kw_only=True)
class ServingOptions(TargetOptions):
    """A closed loop of `concurrency` requests in flight, or open-loop Poisson arrivals at `request_rate`."""

    input_len: int = flag(512, group=_LOAD, minimum=1, help="tokens of each prompt")
    output_len: int = flag(64, group=_LOAD, minimum=1, help="tokens to generate for each")
    num_prompts: int = flag(16, group=_LOAD, minimum=1, help="requests to measure")
    warmup: int = flag(0, group=_LOAD, minimum=0, help="requests of the same kind before the measured ones")
    prefix_len: int = flag(
        0, group=_LOAD, minimum=0, help="tokens of --input-len that all prompts have in common at their start"
    )
    same_prompt: bool = flag(False, group=_LOAD, help="send the same prompt every time")
    concurrency: int | None = flag(
        group=_LOAD,
        exclusive="arrivals",
        minimum=1,
        default_text="1",
        help="requests in flight: the next starts when one ends",
    )
    request_rate: float | None = flag(
        group=_LOAD,
        exclusive="arrivals",
        parse=parse_rate,
        metavar="PER_S",
        default_text="inf, as --concurrency allows",
        help="requests per second, as Poisson arrivals that wait for no answer",
    )
    background_input_len: int | None = flag(
        group=_LOAD,
        minimum=1,
        help="keep one prompt of this many tokens prefilling beside the load, and report its speed apart",
    )
    slo: Slo | None = flag(
        group="report",
        parse=parse_slo,
        metavar="TERMS",
        help="report goodput, the requests per second that meet all terms: ttft=2s,tbt=100ms,e2e=30s;"
        " tbt is a request's largest gap between two tokens",
    )


@dataclass(frozen=True, kw_only=True)
class ServingResults:
    """`background_prefill_tokens_per_s` is None without a background load that finished a prompt."""

    summary: Summary
    background_requests: int
    background_prefill_tokens_per_s: float | None


async def run(options: ServingOptions, target: Target) -> Report:
    """Warm up, run the load, and sum it up."""
    supply = prompts(
        PromptShape(
            input_len=options.input_len,
            vocab_size=target.vocab_size,
            seed=options.seed,
            prefix_len=options.prefix_len,
            same_prompt=options.same_prompt,
        )
    )
    target.check_fits(
        options.input_len + options.output_len,
        f"--input-len {options.input_len} with --output-len {options.output_len}",
    )
    background_len = options.background_input_len
    if background_len is not None:
        target.check_fits(background_len + 1, f"--background-input-len {background_len}")
    concurrency = options.concurrency or 1
    warmup = await closed_loop(target, list(islice(supply, options.warmup)), options.output_len, concurrency)
    background: list[Record] = []
    async with asyncio.TaskGroup() as group:
        beside = group.create_task(_background(options, target, background))
        records = await _load(options, target, list(islice(supply, options.num_prompts)), concurrency)
        beside.cancel()
    return _report(options, warmup, records, background)


async def _load(
    options: ServingOptions, target: Target, load: Sequence[Prompt], concurrency: int
) -> list[Record]:
    if options.request_rate is None:
        return await closed_loop(target, load, options.output_len, concurrency)
    arrivals = poisson_arrivals(len(load), options.request_rate, options.seed)
    return await open_loop(target, load, options.output_len, arrivals)


async def _background(options: ServingOptions, target: Target, records: list[Record]) -> None:
    """Prefill long prompts in turn until cancelled; a failure ends it, lest it spin on a dead server."""
    if options.background_input_len is None:
        return
    shape = PromptShape(
        input_len=options.background_input_len,
        vocab_size=target.vocab_size,
        seed=options.seed,
        series="background",
    )
    for prompt in prompts(shape):
        records.append(await target.run(prompt, 1))
        if not records[-1].ok:
            return


def _report(
    options: ServingOptions, warmup: Sequence[Record], records: Sequence[Record], background: Sequence[Record]
) -> Report:
    one_at_a_time = options.request_rate is None and options.concurrency in (None, 1)
    summary = summarize(records, output_len=options.output_len, one_at_a_time=one_at_a_time, slo=options.slo)
    results = ServingResults(
        summary=summary,
        background_requests=len(background),
        background_prefill_tokens_per_s=prefill_rate([record for record in background if record.ok]),
    )
    beside = (("warm-up", warmup), ("background", background))
    failures = [f"{name}: {record.error}" for name, group in beside for record in group if not record.ok]
    failures += [f"{summary.failed} of {summary.requests} requests: {error}" for error in summary.errors]
    return Report(results=results, rows=_rows(options, results), errors=failures)


def _rows(options: ServingOptions, results: ServingResults) -> list[Row]:
    summary = results.summary
    hit_rate = "not reported" if summary.hit_rate is None else f"{summary.hit_rate:.1%}"
    rows: list[Row] = [
        ("latency, ms", "p50", "p90", "p99", "mean"),
        spread_row("TTFT", summary.ttft),
        spread_row("TPOT", summary.tpot),
        spread_row("ITL", summary.itl),
        spread_row("E2E", summary.e2e),
        ("requests", str(summary.requests)),
        ("failed", str(summary.failed)),
        ("ended early", str(summary.short_outputs)),
        ("duration, s", number(summary.duration_s)),
        ("requests/s", number(summary.requests_per_s)),
        ("input tokens/s", number(summary.input_tokens_per_s)),
        ("output tokens/s", number(summary.output_tokens_per_s)),
        ("hit rate", hit_rate),
    ]
    if summary.prefill_tokens_per_s is not None:
        rows.append(("prefill tokens/s", number(summary.prefill_tokens_per_s)))
    if options.slo is not None:
        rows.append(("goodput, requests/s", number(summary.goodput_requests_per_s)))
    if options.background_input_len is not None:
        rows.append(("background prefill tokens/s", number(results.background_prefill_tokens_per_s)))
    return rows
