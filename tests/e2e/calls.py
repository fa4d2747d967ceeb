"""Requests and answers of the API, as a client makes and reads them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
import pytest

from jkv.api import jkv_pb2 as pb
from jkv.client.rpc import Generation


def messages(case: dict[str, Any]) -> pb.Messages:
    return pb.Messages(messages=[pb.Message(**message) for message in case["messages"]])


def ids(tokens: Iterable[int]) -> pb.TokenIds:
    return pb.TokenIds(ids=tokens)


def greedy(max_tokens: int, **fields: Any) -> pb.Sampling:
    return pb.Sampling(max_tokens=max_tokens, temperature=0, **fields)


def collect(chunks: Iterable[pb.GenerateChunk]) -> Generation:
    """A stream put together; every sequence must say once how it ended."""
    result = Generation()
    for chunk in chunks:
        assert not result.choices or chunk.index not in result.usages, "a chunk after the last one"
        assert bool(chunk.finish_reason) == chunk.HasField("usage")
        result.add(chunk)
    assert set(result.usages) == set(result.choices)
    return result


def settled(case: dict[str, Any]) -> int:
    """Tokens of a golden case before the first step that rounding may decide."""
    return next((i for i, margin in enumerate(case["margins"]) if margin < 0.005), len(case["greedy_ids"]))


def refusal(call: Iterable[pb.GenerateChunk]) -> Any:
    """The error of a stream that must fail."""
    with pytest.raises(grpc.RpcError) as raised:
        list(call)
    return raised.value
