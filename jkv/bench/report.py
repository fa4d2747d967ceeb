"""Results as a table for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jkv.bench.calibrate import REFERENCE_MATMUL_GFLOPS, Calibration
from jkv.bench.clients import TargetInfo
from jkv.bench.metrics import Spread
from jkv.terminal import aligned

Row = Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A finished benchmark. `results` are the numbers, `rows` the same for reading, aligned in columns.

    `errors` says what failed, empty when nothing did.
    """

    results: Any
    rows: Sequence[Row]
    errors: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A report and where it comes from: `target` and `calibration` are None where neither server nor machine
    shows in the numbers.
    """

    report: Report
    subject: str
    target: TargetInfo | None = None
    calibration: Calibration | None = None


def as_json(name: str, options: Any, measured: Measured) -> str:
    """One JSON object; `options` and the results are dataclasses or lists of them, times in seconds."""
    document = {
        "benchmark": name,
        "options": options,
        "target": measured.target,
        "calibration": measured.calibration,
        "results": measured.report.results,
        "errors": list(measured.report.errors),
    }
    return json.dumps(document, default=dataclasses.asdict, indent=2, allow_nan=False)


def as_text(name: str, measured: Measured) -> str:
    """A table, then the machine's calibration, then each error."""
    report = measured.report
    lines = [f"{name}: {measured.subject}", *aligned(report.rows)]
    if measured.calibration is not None:
        lines.append(_machine(measured.calibration))
    return "\n".join([*lines, *(f"FAILED: {error}" for error in report.errors)])


def _machine(calibration: Calibration) -> str:
    return (
        f"this machine: matmul {calibration.matmul_gflops:.0f} GFLOP/s"
        f" ({calibration.matmul_vs_reference:.2f} times the reference's {REFERENCE_MATMUL_GFLOPS:.0f}),"
        f" memory read {calibration.memory_read_gb_per_s:.1f} GB/s"
    )


def milliseconds(seconds: float | None) -> str:
    return "n/a" if seconds is None else f"{seconds * 1000:.2f}"


def number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


def spread_row(label: str, spread: Spread | None) -> Row:
    """`label`, then p50, p90, p99 and mean in milliseconds."""
    if spread is None:
        return (label, "n/a", "n/a", "n/a", "n/a")
    return (label, *(milliseconds(value) for value in (spread.p50, spread.p90, spread.p99, spread.mean)))
