"""What a policy has made of a load, simulated or real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jkv.bench.report import Row, number


@dataclass(frozen=True, kw_only=True)
class PolicyResults:
    """Times to the first token in seconds, hit tokens as a part of the ideal, requests ended a second."""

    policy: str
    hits_of_ideal: float
    ttft_p50: float
    ttft_p90: float
    requests_per_s: float


def policy_rows(head: str, policies: Sequence[PolicyResults]) -> list[Row]:
    rows: list[Row] = [(head, "hits of ideal", "TTFT p50, s", "TTFT p90, s", "requests/s")]
    for each in policies:
        cells = (each.ttft_p50, each.ttft_p90, each.requests_per_s)
        rows.append((f"  {each.policy}", f"{each.hits_of_ideal:.1%}", *(number(cell) for cell in cells)))
    return rows
