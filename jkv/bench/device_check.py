"""`python -m jkv.bench device_check`: a device's kernels, copies and cache tiers, held against what the same
device can do; made for a machine that is at hand for minutes.

Options and report; what runs on the device is in jkv.bench.device_kernels, after the engine has left it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jkv.bench import tiers
from jkv.bench.attention import AttentionOptions, Timing
from jkv.bench.options import ReportOptions
from jkv.bench.random_model import SHAPES, write_random_model
from jkv.bench.report import Report, Row
from jkv.flags import flag


@dataclass(frozen=True, kw_only=True)
class DeviceCheckOptions(ReportOptions):
    """Raises:
    ConfigError: a value out of its range.
    """

    shape: str = flag(
        "1b",
        group="load",
        choices=tuple(SHAPES),
        help="of the model with random weights: 1b for a GPU, toy for a try on CPU",
    )
    directory: str | None = flag(
        group="load",
        metavar="DIR",
        default_text="the system's temporary one",
        help="where the model and L3 are written, and removed",
    )


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Bytes a second between the device and pinned host memory, in arrays of a page's size."""

    to_device: float
    to_host: float


@dataclass(frozen=True, kw_only=True)
class DeviceCheck:
    """`largest_error` is the kernel's against the XLA path, over one ragged step."""

    device: str
    kernel: str
    largest_error: float
    decode: Timing
    prefill: Timing
    copies: Copies
    tiers: tiers.TiersResults


async def run(options: DeviceCheckOptions) -> tuple[Report, str]:
    """The report, and what it is of: first with an engine that has the device, then without.

    Raises:
        TargetError: the engine does not start or answer.
    """
    shape = SHAPES[options.shape]
    with tempfile.TemporaryDirectory(prefix="jkv-check-", dir=options.directory) as made:
        model = Path(made) / "model"
        write_random_model(model, shape)
        asked = tiers.TiersOptions(
            serve_flags=f"--model {model} {shape.serve_flags}",
            directory=made,
            input_lens=shape.input_lens,
            repeats=2,
        )
        async with tiers.engine(asked) as engine:
            served = await tiers.run(asked, engine)
    attention = AttentionOptions(
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        contexts=str(shape.context),
        seqs=shape.seqs,
        chunk=shape.chunk,
    )
    from jkv.bench import device_kernels

    found = await asyncio.to_thread(device_kernels.measure, attention, shape.layers)
    results = DeviceCheck(**found, tiers=served.results)
    return Report(results=results, rows=_rows(results), errors=served.errors), results.device


def _rows(check: DeviceCheck) -> list[Row]:
    """A table in Markdown."""
    decode, prefill = check.decode, check.prefill
    rows = [
        ("measure", "value", "beside"),
        ("---", "---", "---"),
        (f"{check.kernel} against XLA, largest error", f"{check.largest_error:.1e}", ""),
        (
            f"decode attention, {decode.context} tokens, KV GB/s",
            f"{decode.kv_bytes / decode.seconds / 1e9:.0f}",
            f"{decode.share:.2f} of a copy",
        ),
        (
            f"prefill attention, {prefill.context} tokens, TFLOP/s",
            f"{prefill.flops / prefill.seconds / 1e12:.2f}",
            "",
        ),
        ("pinned host to device, GB/s", f"{check.copies.to_device / 1e9:.1f}", ""),
        ("device to pinned host, GB/s", f"{check.copies.to_host / 1e9:.1f}", ""),
    ]
    if check.tiers.speeds is not None:
        restore = check.tiers.speeds.l2_load
        share = f"{restore / check.copies.to_device:.2f} of the copy"
        rows.append(("L2 to L1, GB/s", f"{restore / 1e9:.1f}", share))
    for length in check.tiers.lengths:
        for case, seconds in length.ttft.items():
            rows.append((f"TTFT of {length.input_len} tokens, {case}, ms", f"{seconds * 1e3:.1f}", ""))
    return [("|", *_between(row), "|") for row in rows]


def _between(row: Sequence[str]) -> Row:
    first, *rest = row
    return (first, *(cell for text in rest for cell in ("|", text)))
