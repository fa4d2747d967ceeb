"""`python -m jkv.bench BENCHMARK ...`; without one it lists them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jkv import flags
from jkv.bench import (
    attention,
    cached,
    cluster,
    device_check,
    interference,
    multiturn,
    router,
    serving,
    tiers,
    trace,
)
from jkv.bench.calibrate import calibrate
from jkv.bench.cluster_real import measure
from jkv.bench.drive import Target, connected
from jkv.bench.options import ReportOptions, TargetOptions
from jkv.bench.report import Measured, Report, as_json, as_text
from jkv.errors import JkvError
from jkv.terminal import forget_stdout


async def _on_target(run: Callable[[Any, Target], Awaitable[Report]], options: TargetOptions) -> Measured:
    """A server that runs already."""
    async with connected(
        options.target, model=options.model, vocab_size=options.vocab_size, timeout_s=options.timeout
    ) as target:
        calibration = await asyncio.to_thread(calibrate)
        return Measured(
            report=await run(options, target),
            subject=f"{target.info.model} at {options.target}",
            target=target.info,
            calibration=calibration,
        )


async def _on_engine(options: tiers.TiersOptions) -> Measured:
    """A server that the benchmark starts, unless it is given one."""
    async with tiers.engine(options) as engine:
        calibration = await asyncio.to_thread(calibrate)
        return Measured(
            report=await tiers.run(options, engine),
            subject=engine.subject,
            target=engine.target.info,
            calibration=calibration,
        )


async def _offline(options: trace.TraceOptions) -> Measured:
    return Measured(report=await asyncio.to_thread(trace.run, options), subject=options.file)


async def _cluster(options: cluster.ClusterOptions) -> Measured:
    subject = options.file or "groups of prompts"
    if options.real is None:
        return Measured(report=await asyncio.to_thread(cluster.run, options), subject=subject)
    calibration = await asyncio.to_thread(calibrate)
    real = await measure(options.real)
    report = await asyncio.to_thread(cluster.run, options, real)
    return Measured(report=report, subject=subject, calibration=calibration)


async def _attention(options: attention.AttentionOptions) -> Measured:
    report, subject = await asyncio.to_thread(attention.run, options)
    return Measured(report=report, subject=subject)


async def _device_check(options: device_check.DeviceCheckOptions) -> Measured:
    report, subject = await device_check.run(options)
    return Measured(report=report, subject=subject)


async def _router(options: router.RouterOptions) -> Measured:
    calibration = await asyncio.to_thread(calibrate)
    report = await asyncio.to_thread(router.run, options)
    return Measured(report=report, subject="made-up pages and prompts", calibration=calibration)


@dataclass(frozen=True, kw_only=True)
class _Benchmark:
    options: type[ReportOptions]
    run: Callable[[Any], Awaitable[Measured]]
    description: str


_BENCHMARKS = {
    "serving": _Benchmark(
        options=serving.ServingOptions,
        run=partial(_on_target, serving.run),
        description="Send many requests; report latency, throughput, hit rate and goodput.",
    ),
    "interference": _Benchmark(
        options=interference.InterferenceOptions,
        run=partial(_on_target, interference.run),
        description="Report how long prompts slow a running stream, and how fast they prefill beside it.",
    ),
    "cached": _Benchmark(
        options=cached.CachedOptions,
        run=partial(_on_target, cached.run),
        description="Compare the time to first token of new prompts with that of the same prompts again.",
    ),
    "multiturn": _Benchmark(
        options=multiturn.MultiturnOptions,
        run=partial(_on_target, multiturn.run),
        description="Hold many conversations; compare what the cache serves with an infinite one.",
    ),
    "tiers": _Benchmark(
        options=tiers.TiersOptions,
        run=_on_engine,
        description="Compare the time to first token, and the speed of loads, of each tier of the cache.",
    ),
    "trace": _Benchmark(
        options=trace.TraceOptions,
        run=_offline,
        description="Replay a recorded load through the cache's policies; report the hit rate by capacity.",
    ),
    "router": _Benchmark(
        options=router.RouterOptions,
        run=_router,
        description="Measure a router's index and choices with millions of pages, quiet and under churn.",
    ),
    "attention": _Benchmark(
        options=attention.AttentionOptions,
        run=_attention,
        description="Time this device's attention kernel beside a copy in the same memory.",
    ),
    "device_check": _Benchmark(
        options=device_check.DeviceCheckOptions,
        run=_device_check,
        description="Check this device's kernel, copies and cache tiers; print a table in Markdown.",
    ),
    "cluster": _Benchmark(
        options=cluster.ClusterOptions,
        run=_cluster,
        description="Compare the router's policies on one load, with simulated engines and real ones.",
    ),
}

_USAGE = (
    "usage: python -m jkv.bench {" + ",".join(_BENCHMARKS) + "} [flags]; -h after one of them lists its flags"
)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything was measured, 1 when any request or expectation failed, 2 when nothing could be."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help"):
        print(_USAGE)
        return 0
    benchmark = _BENCHMARKS.get(name)
    if benchmark is None:
        print(f"{_USAGE}\nerror: {name!r} is not a benchmark", file=sys.stderr)
        return 2
    try:
        options = flags.parse(
            benchmark.options, rest, prog=f"python -m jkv.bench {name}", description=benchmark.description
        )
        return asyncio.run(_run(name, benchmark, options))
    except JkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        forget_stdout()
        return 1


async def _run(name: str, benchmark: _Benchmark, options: ReportOptions) -> int:
    measured = await benchmark.run(options)
    text = as_json(name, options, measured) if options.json else as_text(name, measured)
    print(text, flush=True)
    return 1 if measured.report.errors else 0


if __name__ == "__main__":
    sys.exit(main())
