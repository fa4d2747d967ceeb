"""`python -m jkv.bench cluster`: the router's policies side by side on the same load, in virtual time.

Index, scores and policies are the router's own; engines are simulated, with speeds measured on a real one.
With `--real-engines` that is done in the same run, and the policies are compared on real engines too.
Rates are told as parts of what the engines could take in if one infinite cache were shared by all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jkv.bench.cluster_engine import Job, Speeds
from jkv.bench.cluster_load import Groups, Load, group_load, trace_load
from jkv.bench.cluster_real import RealOptions, RealResults
from jkv.bench.cluster_results import PolicyResults, policy_rows
from jkv.bench.cluster_sim import SimShape, Simulation
from jkv.bench.options import ReportOptions
from jkv.bench.report import Report, Row, number
from jkv.errors import ConfigError
from jkv.flags import flag
from jkv.router.policy import POLICIES

_LOAD, _ENGINES, _REAL = "load", "simulated engines", "real engines"


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(ReportOptions):
    """Without `file` the load is 24 groups of prompts with 6,000 shared and 1,200 own tokens."""

    file: str = flag(
        "",
        group=_LOAD,
        metavar="FILE",
        default_text="none: groups of prompts",
        help="a trace in Mooncake's format, at its own intervals",
    )
    requests: int = flag(1000, group=_LOAD, minimum=10, help="requests; of a trace the first ones")
    rates: str = flag(
        "0.25,0.5,0.75,1,1.25", group=_LOAD, metavar="X,X,...", help="rates, as parts of the ideal capacity"
    )
    seed: int = flag(0, group=_LOAD, minimum=0, help="arrivals and prompts of equal seeds are equal")
    engines: int = flag(8, group=_ENGINES, minimum=1, help="engines that are simulated")
    slots: int = flag(8, group=_ENGINES, minimum=1, help="sequences that an engine decodes at a time")
    prefill_tokens_per_s: float = flag(
        2000.0, group=_ENGINES, minimum=0.001, help="measured prefill speed of an engine"
    )
    tpot_ms: float = flag(30.0, group=_ENGINES, minimum=0, help="measured time of a token after the first")
    page_bytes: int = flag(
        1_474_560, group=_ENGINES, minimum=1, help="bytes of a page of 64 tokens; longer pages have more"
    )
    l2_bytes_per_s: float = flag(3e9, group=_ENGINES, minimum=1, help="measured speed of loads from L2")
    l2_share: float = flag(
        0.0, group=_ENGINES, minimum=0, maximum=1, help="part of an engine's pages that are in L2"
    )
    real_engines: int = flag(
        0,
        group=_REAL,
        minimum=0,
        help="start so many engines here, run shorter groups of prompts on them, and simulate with the speeds"
        " measured on one of them",
    )
    real_requests: int = flag(48, group=_REAL, minimum=1, help="requests of each of the two runs of a policy")
    serve_flags: str = flag(
        "",
        group=_REAL,
        metavar="FLAGS",
        default_text="none",
        help="more flags for the engines: --serve-flags='--model PATH'",
    )
    timeout: float = flag(
        600.0, group=_REAL, metavar="SECONDS", minimum=0.001, help="a request that takes longer has failed"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in self.rates.split(","):
            if not _is_positive(part):
                raise ConfigError(f"--rates {self.rates}: {part!r} is not a number above 0")

    @property
    def real(self) -> RealOptions | None:
        """None without real engines."""
        if not self.real_engines:
            return None
        return RealOptions(
            engines=self.real_engines,
            serve_flags=self.serve_flags,
            requests=self.real_requests,
            seed=self.seed,
            timeout=self.timeout,
        )

    @property
    def ladder(self) -> tuple[float, ...]:
        return tuple(float(part) for part in self.rates.split(","))


@dataclass(frozen=True, kw_only=True)
class RateResults:
    """`rate` is in requests a second, `of_capacity` the part of the ideal capacity that this is."""

    rate: float
    of_capacity: float
    policies: list[PolicyResults]


@dataclass(frozen=True, kw_only=True)
class ClusterResults:
    """The ideal is an infinite cache that all engines share: its hit rate, and how many requests a second the
    engines could then compute.
    """

    requests: int
    prompt_tokens: int
    pages_of_an_engine: int
    ideal_hit_rate: float
    ideal_requests_per_s: float
    rates: list[RateResults]
    real: RealResults | None


def load_of(options: ClusterOptions) -> Load:
    """The requests that the options ask for."""
    if options.file:
        return trace_load(Path(options.file), options.requests, options.engines)
    return group_load(Groups(), options.requests, options.seed)


def run(options: ClusterOptions, real: RealResults | None = None) -> Report:
    """Every policy at every rate, with the speeds of real engines where these were measured."""
    if real is not None:
        options = _with_speeds(options, real.speeds)
    load = load_of(options)
    ideal = load.ideal_hit_tokens
    to_compute = (load.prompt_tokens - ideal) / len(load.requests)
    capacity = options.engines * options.prefill_tokens_per_s / to_compute
    results = ClusterResults(
        requests=len(load.requests),
        prompt_tokens=load.prompt_tokens,
        pages_of_an_engine=load.capacity_pages,
        ideal_hit_rate=ideal / load.prompt_tokens,
        ideal_requests_per_s=capacity,
        rates=[
            RateResults(
                rate=part * capacity,
                of_capacity=part,
                policies=[_simulate(options, load, ideal, part * capacity, name) for name in POLICIES],
            )
            for part in options.ladder
        ],
        real=real,
    )
    return Report(results=results, rows=_rows(results), errors=[] if real is None else real.errors)


def _with_speeds(options: ClusterOptions, speeds: Speeds) -> ClusterOptions:
    return dataclasses.replace(
        options,
        prefill_tokens_per_s=speeds.prefill_tokens_per_s,
        tpot_ms=speeds.tpot_s * 1000,
        page_bytes=speeds.page_bytes,
        l2_bytes_per_s=speeds.l2_bytes_per_s,
    )


def _simulate(options: ClusterOptions, load: Load, ideal: int, rate: float, policy: str) -> PolicyResults:
    in_l2 = int(load.capacity_pages * options.l2_share)
    shape = SimShape(
        engines=options.engines,
        speeds=Speeds(
            prefill_tokens_per_s=options.prefill_tokens_per_s,
            l2_bytes_per_s=options.l2_bytes_per_s,
            page_bytes=options.page_bytes * load.page_size // 64,
            tpot_s=options.tpot_ms / 1000,
            slots=options.slots,
        ),
        page_size=load.page_size,
        l1_pages=load.capacity_pages - in_l2,
        l2_pages=in_l2,
        policy=policy,
        seed=options.seed,
    )
    return _summary(policy, Simulation(shape).run(load.jobs(rate)), ideal)


def _summary(policy: str, jobs: Sequence[Job], ideal: int) -> PolicyResults:
    p50, p90 = np.percentile([job.first_token - job.arrival for job in jobs], [50, 90]).tolist()
    return PolicyResults(
        policy=policy,
        hits_of_ideal=sum(job.cached_tokens for job in jobs) / max(ideal, 1),
        ttft_p50=p50,
        ttft_p90=p90,
        requests_per_s=len(jobs) / max(job.end for job in jobs),
    )


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


def _rows(results: ClusterResults) -> list[Row]:
    rows: list[Row] = [
        ("ideal hit rate", f"{results.ideal_hit_rate:.1%}"),
        ("ideal requests/s", number(results.ideal_requests_per_s)),
    ]
    for rate in results.rates:
        head = f"{rate.rate:.2f} requests/s, {rate.of_capacity:g} of the ideal"
        rows += policy_rows(head, rate.policies)
    return rows if results.real is None else [*_real_rows(results.real), *rows]


def _real_rows(real: RealResults) -> list[Row]:
    speeds = real.speeds
    return [
        ("prefill, tokens/s of one real engine", number(speeds.prefill_tokens_per_s)),
        ("time per token after the first, ms", number(speeds.tpot_s * 1000)),
        ("loads from L2, MiB/s", number(speeds.l2_bytes_per_s / 2**20)),
        ("bytes of a page", str(speeds.page_bytes)),
        *policy_rows(f"{real.engines} real engines of {real.model}, saturated", real.policies),
    ]
