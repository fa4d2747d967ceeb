"""`python -m jkv.bench interference`: what long prompts do to a stream that is already running."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from jkv.bench.cache_admin import CacheAdmin
from jkv.bench.drive import Target
from jkv.bench.grpc_client import TIERS
from jkv.bench.load import Prompt, PromptShape, prompts
from jkv.bench.metrics import Record, Spread, gaps_during, prefill_rate, spread
from jkv.bench.options import TargetOptions
from jkv.bench.report import Report, Row, milliseconds, number, spread_row
from jkv.errors import ConfigError
from jkv.flags import flag

# A chat turn: short, so that the stream is soon decoding.
_STREAM_INPUT_LEN = 128


@dataclass(frozen=True, kw_only=True)
class InterferenceOptions(TargetOptions):
    """A stream of `output_len` tokens, alone and then beside `num_prompts` prompts of `input_len` in turn."""

    input_len: int = flag(
        4096, group="load", minimum=1, help="tokens of each prompt that disturbs the stream"
    )
    num_prompts: int = flag(3, group="load", minimum=1, help="how many of them, one after the other")
    output_len: int = flag(
        256, group="load", minimum=2, help="tokens of the stream; it starts again until the prompts are done"
    )
    cached_in: str | None = flag(
        group="load",
        choices=TIERS[:3],
        default_text="nowhere: they are new",
        help="disturb with prompts that this tier of a jkv server's cache holds, and none above it",
    )


@dataclass(frozen=True, kw_only=True)
class InterferenceResults:
    """`disturbed_itl` is over the `disturbed_gaps` gaps that overlap a prefill: prompt sent to first token.

    `ratio` is the disturbed p99 ITL over the quiet TPOT.
    """

    quiet_tpot: float | None
    quiet_itl: Spread | None
    disturbed_itl: Spread | None
    disturbed_gaps: int
    ratio: float | None
    prefill_tokens_per_s: float | None


async def run(options: InterferenceOptions, target: Target) -> Report:
    """Measure the stream quiet, then disturbed; one request of each kind goes first, to compile."""
    target.check_fits(options.input_len + 1, f"--input-len {options.input_len}")
    target.check_fits(
        _STREAM_INPUT_LEN + options.output_len,
        f"--output-len {options.output_len} after a prompt of {_STREAM_INPUT_LEN}",
    )
    streams = _supply(options, target, "stream", _STREAM_INPUT_LEN)
    longs = _supply(options, target, "long", options.input_len)
    warmup = [await target.run(next(streams), options.output_len), await target.run(next(longs), 1)]
    disturbing = list(islice(longs, options.num_prompts))
    if options.cached_in is not None:
        warmup += await _cache(target, disturbing, options.cached_in)
    quiet = await target.run(next(streams), options.output_len)
    disturbed, prefills = await _disturb(target, options.output_len, streams, disturbing)
    report = _report(quiet, disturbed, prefills, warmup)
    return replace(report, errors=[*report.errors, *_not_cached(prefills, options.cached_in)])


async def _cache(target: Target, disturbing: Sequence[Prompt], tier: str) -> list[Record]:
    """Sends the prompts once, then empties the tiers above the one that is to serve them."""
    admin = CacheAdmin(target.client)
    if tier not in (on := await admin.tiers()):
        raise ConfigError(f"--cached-in {tier}: the target has {', '.join(on)}")
    records = [await target.run(prompt, 1) for prompt in disturbing]
    await admin.drain()
    if above := list(on)[: list(on).index(tier)]:
        await admin.flush(above)
    return records


def _not_cached(prefills: Sequence[Record], tier: str | None) -> list[str]:
    if tier is None:
        return []
    served = [record.cached_by_tier or {} for record in prefills if record.ok]
    return [f"served {dict(by)}, not from {tier}" for by in served if not by.get(tier)]


def _supply(options: InterferenceOptions, target: Target, series: str, input_len: int) -> Iterator[Prompt]:
    return prompts(
        PromptShape(input_len=input_len, vocab_size=target.vocab_size, seed=options.seed, series=series)
    )


async def _disturb(
    target: Target, output_len: int, streams: Iterator[Prompt], longs: Sequence[Prompt]
) -> tuple[list[Record], list[Record]]:
    """The streams and the long requests that ran at the same time."""
    decoding, over = asyncio.Event(), asyncio.Event()
    stream_records: list[Record] = []

    async def keep_streaming() -> None:
        while not over.is_set() and all(record.ok for record in stream_records):
            stream_records.append(await target.run(next(streams), output_len, on_token=decoding.set))
        decoding.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(keep_streaming())
        await decoding.wait()
        prefills = [await target.run(prompt, 1) for prompt in longs]
        over.set()
    return stream_records, prefills


def _report(
    quiet: Record, disturbed: Sequence[Record], prefills: Sequence[Record], warmup: Sequence[Record]
) -> Report:
    done = [record for record in prefills if record.ok]
    gaps = gaps_during(disturbed, [(record.sent_at, record.token_times[0]) for record in done])
    disturbed_itl = spread(gaps)
    quiet_tpot = quiet.tpot if quiet.ok else None
    results = InterferenceResults(
        quiet_tpot=quiet_tpot,
        quiet_itl=spread(quiet.gaps) if quiet.ok else None,
        disturbed_itl=disturbed_itl,
        disturbed_gaps=len(gaps),
        ratio=disturbed_itl.p99 / quiet_tpot if disturbed_itl and quiet_tpot else None,
        prefill_tokens_per_s=prefill_rate(done),
    )
    errors = [record.error for record in (*warmup, quiet, *disturbed, *prefills) if not record.ok]
    if not errors and not gaps:
        errors.append(
            "no token of the stream arrived during a prefill: give a longer --input-len or --output-len"
        )
    return Report(results=results, rows=_rows(results), errors=errors)


def _rows(results: InterferenceResults) -> list[Row]:
    return [
        ("latency, ms", "p50", "p90", "p99", "mean"),
        spread_row("ITL quiet", results.quiet_itl),
        spread_row("ITL during prefill", results.disturbed_itl),
        ("TPOT quiet, ms", milliseconds(results.quiet_tpot)),
        ("ITL p99 during prefill / TPOT quiet", number(results.ratio)),
        ("tokens during prefill", str(results.disturbed_gaps)),
        ("prefill tokens/s meanwhile", number(results.prefill_tokens_per_s)),
    ]
