"""The Router service's answers as JSON documents and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jkv.api import jkv_pb2 as pb
from jkv.terminal import aligned

_STATUS_HEAD = (
    "engine",
    "address",
    "model",
    "state",
    "running",
    "waiting",
    "sent",
    "pages",
    "shards",
    "lag",
    "self-test",
)
_EXPLAIN_HEAD = ("engine", "l1", "l2", "l3", "peer", "queue", "load", "prefill", "TTFT")
_TIERS = ("l1", "l2", "l3", "peer")


def status_document(answer: pb.RouterStatusResponse) -> dict[str, Any]:
    """As the message; seconds and bytes."""
    return {
        "cluster": answer.cluster,
        "policy": answer.policy,
        "membership": answer.membership,
        "index_pages": answer.index_pages,
        "index_bytes": answer.index_bytes,
        "engines": [_engine(engine) for engine in answer.engines],
        "refused": [_fields(one) for one in answer.refused],
    }


def _engine(engine: pb.EngineStatus) -> dict[str, Any]:
    document = {name: value for name, value in _fields(engine).items() if name not in ("load", "pages")}
    return {**document, "load": _fields(engine.load), "pages": dict(sorted(engine.pages.items()))}


def _fields(message: Any) -> dict[str, Any]:
    return {item.name: getattr(message, item.name) for item in message.DESCRIPTOR.fields}


def status_lines(document: Mapping[str, Any]) -> list[str]:
    """A line for each engine, then those that were refused, then the cluster as a whole."""
    rows: list[Sequence[str]] = [_STATUS_HEAD]
    for engine in document["engines"]:
        load, pages = engine["load"], engine["pages"]
        rows.append(
            (
                engine["id"],
                engine["address"],
                engine["model"] or "-",
                engine["state"],
                str(load["running"]),
                str(load["waiting"]),
                str(engine["in_flight"]),
                ", ".join(f"{tier} {count}" for tier, count in pages.items()) or "-",
                str(engine["shards"]),
                f"{engine['lag_s']:.1f} s",
                engine["self_test"],
            )
        )
    refused = [f"refused: {one['id']} at {one['address']}: {one['reason']}" for one in document["refused"]]
    whole = (
        f"cluster {document['cluster']}, policy {document['policy']}, members from {document['membership']}, "
        f"{document['index_pages']} pages in the index ({document['index_bytes'] / 2**20:.1f} MiB)"
    )
    return [*(aligned(rows) if document["engines"] else ["no engines"]), *refused, whole]


def explain_document(answer: pb.ExplainResponse) -> dict[str, Any]:
    """As the message; seconds."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "engines": [{**_fields(one), "matched": _fields(one.matched)} for one in answer.engines],
        "chosen": answer.chosen,
        "why": answer.why,
    }


def explain_lines(document: Mapping[str, Any]) -> list[str]:
    """A line for each engine, best first: tokens that it has by tier, expected times; then the choice."""
    rows: list[Sequence[str]] = [_EXPLAIN_HEAD]
    for one in document["engines"]:
        tokens = (str(one["matched"][tier]) for tier in _TIERS)
        times = (_ms(one[name]) for name in ("queue_s", "load_s", "prefill_s", "ttft_s"))
        rows.append((one["id"], *tokens, *times))
    choice = f"{document['prompt_tokens']} tokens go to {document['chosen']}: {document['why']}"
    return [*aligned(rows), choice]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
