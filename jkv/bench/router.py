"""`python -m jkv.bench router`: what choosing an engine costs with a full index, quiet and under churn.

One thread takes events and decides, as a router's event loop does. Decisions come at fixed times; their
latency is from the time at which one was due, so that it has in it what the events before it took. Each
number of engines has a process of its own, so that its memory can be told.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from multiprocessing import get_context

from jkv.bench import router_records
from jkv.bench.metrics import Spread, spread
from jkv.bench.options import ReportOptions
from jkv.bench.report import Report, Row, milliseconds, number, spread_row
from jkv.bench.router_load import EVENT_PAGES, Cluster, Shape
from jkv.errors import ConfigError
from jkv.flags import flag

_LOAD = "load"
_PROMPTS = 200
_FLAT_CHANGES = 2_000_000  # a million pages added and a million removed
_SNAPSHOT_PAGES = 1_000_000
_STATUS = "/proc/self/status"


@dataclass(frozen=True, kw_only=True)
class RouterOptions(ReportOptions):
    """What the index has, and what comes in."""

    pages: int = flag(10_000_000, group=_LOAD, minimum=1_000_000, help="different pages in the index")
    engines: str = flag("1,8,64", group=_LOAD, metavar="N,N,...", help="numbers of engines that share them")
    input_len: int = flag(8192, group=_LOAD, minimum=1, help="tokens of a prompt")
    page_size: int = flag(64, group=_LOAD, minimum=1, help="tokens of a page")
    churn: int = flag(100_000, group=_LOAD, minimum=1000, help="pages added and removed a second")
    rate: float = flag(200.0, group=_LOAD, minimum=1, help="decisions a second while latencies are measured")
    seconds: float = flag(10.0, group=_LOAD, minimum=0.1, help="length of each measurement")
    seed: int = flag(0, group=_LOAD, minimum=0, help="pages and prompts of equal seeds are equal")

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in self.engines.split(","):
            if not (part.strip().isdecimal() and int(part) > 0):
                raise ConfigError(f"--engines {self.engines}: {part!r} is not a number of engines")

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(int(part) for part in self.engines.split(","))


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """From token ids to an engine, in seconds: by the clock, and the thread's own time, which is that of a
    machine with nothing else to do.
    """

    latency: Spread
    cpu: Spread


@dataclass(frozen=True, kw_only=True)
class SizeResults:
    """With one number of engines. Bytes are what the process grew by for each page, in physical memory."""

    engines: int
    pages: int
    bytes_per_page: float
    bytes_per_page_after_churn: float
    quiet: Decisions
    churning: Decisions
    decisions_per_s: float  # one after the other, under the same churn
    event_cpu: Spread  # of a thousand pages
    longest_event_cpu_s: float
    snapshot_cpu_s: float  # for an engine with a million pages, known before


@dataclass(frozen=True, kw_only=True)
class RouterResults:
    sizes: list[SizeResults]
    etcd: router_records.RecordResults


def run(options: RouterOptions) -> Report:
    """Build an index for each number of engines, and measure it."""
    sizes = []
    for engines in options.sizes:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            sizes.append(alone.submit(_measure, options, engines).result())
    results = RouterResults(
        sizes=sizes,
        etcd=router_records.measure(100_000, options.seed),
    )
    return Report(results=results, rows=_rows(results), errors=[])


def _measure(options: RouterOptions, engines: int) -> SizeResults:
    shape = Shape(
        pages=options.pages,
        engines=engines,
        prompts=_PROMPTS,
        input_len=options.input_len,
        page_size=options.page_size,
        seed=options.seed,
    )
    cluster = Cluster(shape)
    gc.collect()
    before = _resident_bytes()
    took = cluster.fill()
    pages = cluster.routing.index.pages
    filled = _resident_bytes() - before
    quiet = _decisions(cluster, options, iter(()))
    changes = int(options.churn * options.seconds)
    events = cluster.churn_events(changes, 0)
    churning = _decisions(cluster, options, iter(events))
    events = cluster.churn_events(changes, len(events))
    per_s = _throughput(cluster, options, events)
    first = 2 * len(events)
    took += [cluster.hear(*event) for event in cluster.churn_events(_FLAT_CHANGES, first)]
    churned = _resident_bytes() - before
    return SizeResults(
        engines=engines,
        pages=pages,
        bytes_per_page=filled / pages,
        bytes_per_page_after_churn=churned / pages,
        quiet=quiet,
        churning=churning,
        decisions_per_s=per_s,
        event_cpu=_spread(took),
        longest_event_cpu_s=max(took),
        snapshot_cpu_s=cluster.snapshot(_SNAPSHOT_PAGES),
    )


def _decisions(cluster: Cluster, options: RouterOptions, events: Iterator[tuple[bytes, int]]) -> Decisions:
    """Decisions and events, each at its time; one that is late comes as soon as it can."""
    latency: list[float] = []
    cpu: list[float] = []
    prompts = cycle(cluster.prompts)
    start = time.perf_counter()
    event_s, event = EVENT_PAGES / options.churn, next(events, None)
    heard = 0
    while (due := len(latency) / options.rate) < options.seconds:
        if event is not None and heard * event_s <= due:
            _wait(start + heard * event_s)
            cluster.hear(*event)
            event, heard = next(events, None), heard + 1
            continue
        _wait(start + due)
        began = time.thread_time()
        cluster.decide(next(prompts))
        latency.append(time.perf_counter() - start - due)
        cpu.append(time.thread_time() - began)
        cluster.settle()
    return Decisions(latency=_spread(latency), cpu=_spread(cpu))


def _throughput(cluster: Cluster, options: RouterOptions, events: Sequence[tuple[bytes, int]]) -> float:
    """Decisions a second, one after the other, with the events that come meanwhile."""
    start = time.perf_counter()
    decided = heard = 0
    prompts = cycle(cluster.prompts)
    while (passed := time.perf_counter() - start) < options.seconds:
        while heard < min(passed * options.churn / EVENT_PAGES, len(events)):
            cluster.hear(*events[heard])
            heard += 1
        cluster.decide(next(prompts))
        cluster.settle()
        decided += 1
    return decided / passed


def _wait(until: float) -> None:
    if (left := until - time.perf_counter()) > 0:
        time.sleep(left)


def _spread(values: Sequence[float]) -> Spread:
    found = spread(values)
    assert found is not None, "a measurement has at least one decision"
    return found


def _resident_bytes() -> int:
    """Physical memory of this process (Linux)."""
    with open(_STATUS, encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def _rows(results: RouterResults) -> list[Row]:
    rows: list[Row] = []
    for size in results.sizes:
        rows += [
            (f"{size.engines} engines, {size.pages} pages", "p50", "p90", "p99", "mean"),
            spread_row("  decision, ms", size.quiet.latency),
            spread_row("  its own CPU time, ms", size.quiet.cpu),
            spread_row("  decision under churn, ms", size.churning.latency),
            spread_row("  its own CPU time, ms", size.churning.cpu),
            ("  decisions a second under churn", f"{size.decisions_per_s:.0f}"),
            ("  bytes a page", number(size.bytes_per_page)),
            ("  bytes a page after a million were exchanged", number(size.bytes_per_page_after_churn)),
            spread_row("  CPU time of an event of a thousand pages, ms", size.event_cpu),
            ("  of the longest", milliseconds(size.longest_event_cpu_s)),
            ("  CPU time of a snapshot of a million pages, s", number(size.snapshot_cpu_s)),
        ]
    return [
        *rows,
        ("etcd writes for each page, store filling", f"{results.etcd.filling:.4f}"),
        ("etcd writes for each page, store full", f"{results.etcd.churning:.4f}"),
    ]
