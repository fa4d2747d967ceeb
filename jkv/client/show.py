"""What the client prints: text as it streams, a usage line, or one JSON object."""

from __future__ import annotations

import json
import sys
from typing import Any

from jkv.api import jkv_pb2 as pb
from jkv.client.rpc import Generation


def print_chunk(chunk: pb.GenerateChunk) -> None:
    """Stream a sequence's text to the terminal."""
    sys.stdout.write(chunk.text)
    sys.stdout.flush()


def print_nothing(chunk: pb.GenerateChunk) -> None:
    """For answers that are printed once they are complete."""


def print_choices(result: Generation) -> None:
    """Several sequences, one after another."""
    for index, choice in sorted(result.choices.items()):
        print(f"--- {index} ---")
        print(choice.text)


def print_usage(result: Generation) -> None:
    """The usage line, on stderr."""
    print(usage_line(result), file=sys.stderr)


def usage_line(result: Generation) -> str:
    """Tokens, where the cached ones came from, TTFT and speed."""
    usage = result.usage
    tiers = ", ".join(f"{tier} {count}" for tier, count in usage["cached_by_tier"].items() if count)
    cached = f"{usage['cached_tokens']} cached" + (f": {tiers}" if tiers else "")
    parts = [f"prompt {usage['prompt_tokens']} tokens ({cached})"]
    reasons = sorted({choice.finish_reason for choice in result.choices.values()})
    parts.append(f"completion {usage['completion_tokens']} tokens ({', '.join(reasons)})")
    if result.ttft is not None:
        parts.append(f"TTFT {result.ttft:.3f} s")
    if result.tokens_per_second is not None:
        parts.append(f"{result.tokens_per_second:.1f} tokens/s")
    return ", ".join(parts)


def print_json(document: dict[str, Any]) -> None:
    """One object on one line."""
    print(json.dumps(document, ensure_ascii=False))


def as_document(result: Generation, *, logprobs: bool) -> dict[str, Any]:
    """A generation as JSON; times in seconds."""
    choices = []
    for index, choice in sorted(result.choices.items()):
        entry: dict[str, Any] = {
            "index": index,
            "text": choice.text,
            "token_ids": choice.token_ids,
            "finish_reason": choice.finish_reason,
        }
        if logprobs:
            entry["logprobs"] = choice.logprobs
        choices.append(entry)
    return {
        "choices": choices,
        "usage": result.usage,
        "ttft_s": result.ttft,
        "seconds": result.seconds,
        "tokens_per_s": result.tokens_per_second,
    }
