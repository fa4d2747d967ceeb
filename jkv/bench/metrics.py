"""From timed requests to numbers. Pure; every time is in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from jkv.bench.slo import Slo


@dataclass(frozen=True, kw_only=True)
class Record:
    """One request as its client saw it, on one clock.

    `token_times` has an entry for each token that arrived; tokens of one chunk share a time. Over HTTP a
    chunk counts as one token, since the protocol does not say how many it holds; `output_tokens` is the
    server's own count where it gives one. `output_ids` are its tokens where the protocol tells them.
    `cached_tokens` and `cached_by_tier` are None where the server does not report them.
    """

    sent_at: float
    ended_at: float
    token_times: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    output_ids: tuple[int, ...] = ()
    cached_tokens: int | None = None
    cached_by_tier: Mapping[str, int] | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.sent_at

    @property
    def e2e(self) -> float:
        return self.ended_at - self.sent_at

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: the time from each token to the next."""
        return [after - before for before, after in pairwise(self.token_times)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, or None for an output of one token."""
        if self.output_tokens < 2:
            return None
        return (self.ended_at - self.token_times[0]) / (self.output_tokens - 1)

    def meets(self, slo: Slo) -> bool:
        return self.ok and all(
            limit is None or value <= limit
            for limit, value in (
                (slo.ttft_s, self.ttft),
                (slo.tbt_s, max(self.gaps, default=0.0)),
                (slo.e2e_s, self.e2e),
            )
        )


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Percentiles (linear interpolation) and mean, in seconds."""

    p50: float
    p90: float
    p99: float
    mean: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Latencies are over the requests that succeeded, rates over `duration_s`: first sent to last ended.

    `hit_rate` is cached tokens over prompt tokens, None where the server does not report cached tokens.
    `prefill_tokens_per_s` is prompt tokens that no cache served, as far as reported, over TTFT; only a run
    of one request at a time has it.
    """

    requests: int
    failed: int
    errors: tuple[str, ...]
    short_outputs: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    hit_rate: float | None
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    prefill_tokens_per_s: float | None
    goodput_requests_per_s: float | None
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2e: Spread | None


def spread(values: Sequence[float]) -> Spread | None:
    """The distribution of `values`, or None when there are none."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return Spread(p50=p50, p90=p90, p99=p99, mean=float(np.mean(values)))


def cached_total(records: Sequence[Record]) -> int | None:
    """Cached tokens of all records, or None if a record lacks them."""
    counts = [record.cached_tokens for record in records]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def prefill_rate(records: Sequence[Record]) -> float | None:
    """Prompt tokens computed per second of TTFT, for requests that ran one at a time."""
    computed = sum(record.prompt_tokens - (record.cached_tokens or 0) for record in records)
    waited = sum(record.ttft for record in records)
    return computed / waited if waited else None


def summarize(records: Sequence[Record], *, output_len: int, one_at_a_time: bool, slo: Slo | None) -> Summary:
    """Reduce a run's records; `records` is not empty, `output_len` is what each request asked for."""
    done = [record for record in records if record.ok]
    duration = max(record.ended_at for record in records) - min(record.sent_at for record in records)
    input_tokens = sum(record.prompt_tokens for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    cached = cached_total(done)
    return Summary(
        requests=len(records),
        failed=len(records) - len(done),
        errors=tuple(sorted({record.error for record in records if not record.ok})),
        short_outputs=sum(record.output_tokens < output_len for record in done),
        duration_s=duration,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached,
        hit_rate=cached / input_tokens if cached is not None and input_tokens else None,
        requests_per_s=len(done) / duration,
        input_tokens_per_s=input_tokens / duration,
        output_tokens_per_s=output_tokens / duration,
        prefill_tokens_per_s=prefill_rate(done) if one_at_a_time else None,
        goodput_requests_per_s=None
        if slo is None
        else sum(record.meets(slo) for record in records) / duration,
        ttft=spread([record.ttft for record in done]),
        tpot=spread([record.tpot for record in done if record.tpot is not None]),
        itl=spread([gap for record in done for gap in record.gaps]),
        e2e=spread([record.e2e for record in done]),
    )


def gaps_during(streams: Sequence[Record], spans: Sequence[tuple[float, float]]) -> list[float]:
    """The inter-token latencies of `streams` that overlap any of the `(start, end)` spans."""
    return [
        after - before
        for stream in streams
        for before, after in pairwise(stream.token_times)
        if any(before < end and after > start for start, end in spans)
    ]
