"""Calls to the server, and its answers in the client's terms."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # The time that gRPC gives a connection attempt. Its default of 20 s is too long for a wrong address.
    ("grpc.min_reconnect_backoff_ms", 5000),
)
# How gRPC words that no server was reached, in contrast to a server that is not ready.
_NOT_CONNECTED = ("failed to connect", "errors resolving", "connection attempt timed out")
_TIERS = ("l1", "l2", "l3", "peer")


class CallError(Exception):
    """A call that failed; the message is `CODE: details`."""


@contextmanager
def connect(address: str) -> Iterator[grpc.Channel]:
    """A channel to the server; failed calls inside become CallError."""
    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise CallError(_describe(error, address)) from error


def _describe(error: Any, address: str) -> str:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and any(words in details for words in _NOT_CONNECTED):
        reason = details.rpartition(": ")[2].rstrip("]")
        return f"{code.name}: no server answers at {address} ({reason})"
    return f"{code.name}: {' '.join(details.split())}"


@dataclass(kw_only=True)
class Choice:
    """One generated sequence."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = ""


@dataclass(kw_only=True)
class Generation:
    """All that a Generate call returned; times in seconds from the call."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usages: dict[int, pb.Usage] = field(default_factory=dict)
    ttft: float | None = None
    seconds: float = 0.0

    def add(self, chunk: pb.GenerateChunk) -> None:
        choice = self.choices.setdefault(chunk.index, Choice())
        choice.text += chunk.text
        choice.token_ids += chunk.token_ids
        choice.logprobs += [
            MessageToDict(entry, always_print_fields_with_no_presence=True) for entry in chunk.logprobs
        ]
        choice.finish_reason = chunk.finish_reason or choice.finish_reason
        if chunk.HasField("usage"):
            self.usages[chunk.index] = chunk.usage

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens; the sequences share one prompt, whose cached part is that of the first sequence."""
        first = self.usages.get(0, pb.Usage())
        return {
            "prompt_tokens": first.prompt_tokens,
            "completion_tokens": sum(usage.completion_tokens for usage in self.usages.values()),
            "cached_tokens": first.cached_tokens,
            "cached_by_tier": {tier: getattr(first.cached_by_tier, tier) for tier in _TIERS},
        }

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after each sequence's first one, over the time since the first; None for a single token."""
        tokens = sum(len(choice.token_ids) - 1 for choice in self.choices.values() if choice.token_ids)
        if self.ttft is None or tokens < 1 or self.seconds <= self.ttft:
            return None
        return tokens / (self.seconds - self.ttft)


def generate(
    channel: grpc.Channel,
    request: pb.GenerateRequest,
    timeout: float | None,
    show: Callable[[pb.GenerateChunk], None],
) -> Generation:
    """Run a Generate call, showing each chunk as it comes; leaving early cancels it."""
    stub: Any = pb_grpc.GenerationStub(channel)
    result, started = Generation(), time.monotonic()
    call = stub.Generate(request, timeout=timeout)
    try:
        for chunk in call:
            if result.ttft is None and chunk.token_ids:
                result.ttft = time.monotonic() - started
            result.add(chunk)
            show(chunk)
    finally:
        call.cancel()
    result.seconds = time.monotonic() - started
    return result
