"""Service level objectives: `ttft=2s,tbt=100ms,e2e=30s`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TERM = re.compile(r"(ttft|tbt|e2e)=(\d+(?:\.\d+)?)(ms|s)")


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Limits in seconds; a request that meets all of them counts for goodput. None sets no limit.

    `tbt_s` bounds the largest gap between two tokens of the request: one long stall is what a reader notices.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None
    e2e_s: float | None = None


def parse_slo(text: str) -> Slo:
    """Parse comma-separated `NAME=TIME` terms; NAME is ttft, tbt or e2e, TIME ends in `s` or `ms`.

    Raises:
        ValueError: a term does not parse, or a name comes twice.
    """
    limits: dict[str, float] = {}
    for term in text.split(","):
        match = _TERM.fullmatch(term.strip())
        if match is None:
            raise ValueError(
                f"{term!r} is not ttft=TIME, tbt=TIME or e2e=TIME, with a TIME such as 2s or 100ms"
            )
        name, number, unit = match.groups()
        if f"{name}_s" in limits:
            raise ValueError(f"{name} comes twice")
        limits[f"{name}_s"] = float(number) / (1000 if unit == "ms" else 1)
    return Slo(**limits)
