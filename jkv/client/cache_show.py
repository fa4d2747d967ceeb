"""The Cache service's answers as JSON documents and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jkv.api import jkv_pb2 as pb
from jkv.terminal import aligned

_COUNTS = (
    ("pinned pages", "pinned_pages"),
    ("hits, pages", "hits"),
    ("hits, tokens", "hit_tokens"),
    ("misses, pages", "misses"),
    ("loads", "loads"),
    ("stores", "stores"),
    ("drops", "drops"),
    ("evictions", "evictions"),
    ("quarantined", "quarantined"),
)


def stats_document(answer: pb.CacheStatsResponse) -> dict[str, Any]:
    """As the message, but with the tiers by name; bytes and seconds."""
    return {
        "tiers": {tier.tier: _fields(tier, "tier") for tier in answer.tiers},
        **_fields(answer, "tiers"),
    }


def _fields(message: Any, *without: str) -> dict[str, Any]:
    names = [item.name for item in message.DESCRIPTOR.fields if item.name not in without]
    values = {name: getattr(message, name) for name in names}
    return {name: dict(sorted(v.items())) if isinstance(v, Mapping) else v for name, v in values.items()}


def stats_lines(document: Mapping[str, Any]) -> list[str]:
    """A column for each tier, then what went wrong in any, then the cache as a whole."""
    tiers: Mapping[str, dict[str, Any]] = document["tiers"]
    rows: list[Sequence[str]] = [("", *tiers)]
    rows.append(("pages", *(f"{one['pages']} of {one['pages_capacity']}" for one in tiers.values())))
    rows.append(("size", *(_of_size(one) for one in tiers.values())))
    rows += [(label, *(str(one[name]) for one in tiers.values())) for label, name in _COUNTS]
    for label, name in (("read", "read_bytes_per_s"), ("written", "write_bytes_per_s")):
        rows.append((label, *(_speed(one[name]) for one in tiers.values())))
    rows.append(("breaker", *(one["breaker"] for one in tiers.values())))
    errors = [
        f"{tier} errors: {_counted(one['errors_by_reason'])}"
        for tier, one in tiers.items()
        if one["errors_by_reason"]
    ]
    whole = (
        f"{document['pending_writes']} pending writes, {document['gated_loads']} gated and "
        f"{document['late_loads']} late loads, prefill {document['prefill_tokens_per_s']:.1f} tokens/s"
    )
    return [*aligned(rows), *errors, whole]


def lookup_document(answer: pb.LookupResponse) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "cached_by_tier": _fields(answer.cached_by_tier),
    }


def lookup_line(document: Mapping[str, Any]) -> str:
    tiers = {tier: count for tier, count in document["cached_by_tier"].items() if count}
    where = f": {_counted(tiers)}" if tiers else ""
    return f"{document['cached_tokens']} of {document['prompt_tokens']} tokens are cached{where}"


def pages(count: int) -> str:
    return f"{count} page" if count == 1 else f"{count} pages"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _of_size(tier: Mapping[str, Any]) -> str:
    return f"{_size(tier['bytes'])} of {_size(tier['bytes_capacity'])}"


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _speed(count: float) -> str:
    return f"{_size(count)}/s" if count else "-"
