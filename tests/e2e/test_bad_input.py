"""What cannot be served is refused by name, and the server lives."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest

from jkv.api import jkv_pb2 as pb
from jkv.api.grpc_server import SERVICE
from tests.e2e.calls import collect, greedy, ids, refusal
from tests.e2e.server import Server

VOCABULARY, CONTEXT = 49152, 8192  # of the default model
TINY_VOCABULARY, TINY_L1 = 512, 320  # 20 pages of 16 tokens, less than the context


def refused(server: Server, request: pb.GenerateRequest, *words: str) -> None:
    """Refused as INVALID_ARGUMENT with these words in its reason; the next request is answered."""
    error = refusal(server.stub.Generate(request, timeout=60))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error.details()
    for word in words:
        assert word in error.details()
    fine = pb.GenerateRequest(token_ids=ids([1, 2, 3]), sampling=greedy(1, ignore_eos=True))
    assert len(collect(server.stub.Generate(fine, timeout=60)).choices[0].token_ids) == 1


def say(role: str) -> dict[str, Any]:
    return {"messages": pb.Messages(messages=[pb.Message(role=role, content="hi")])}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ["input:", "prompt or token_ids or messages"]),
        ({"prompt": ""}, ["prompt:", "must not be empty"]),
        ({"token_ids": ids([])}, ["token_ids:", "at least one token"]),
        ({"messages": pb.Messages()}, ["messages:"]),
        ({"token_ids": ids([5, VOCABULARY])}, ["token_ids[1]:", str(VOCABULARY)]),
        ({"token_ids": ids([2**32 - 1])}, ["token_ids[0]:", str(2**32 - 1), str(VOCABULARY)]),
        ({"token_ids": ids([5] * CONTEXT)}, ["token_ids:", f"{CONTEXT} tokens", str(CONTEXT - 1)]),
        (say("wizard"), ["messages", "'wizard'", "user"]),
        ({"prompt": "a", "cache_salt": "x" * 257}, ["cache_salt:", "256", "257"]),
        ({"prompt": "a", "request_id": "a\nb"}, ["request_id:", "printable"]),
    ],
)
def test_inputs(smollm2: Server, fields: dict[str, Any], words: list[str]) -> None:
    refused(smollm2, pb.GenerateRequest(sampling=greedy(4), **fields), *words)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temperature": math.nan}, ["temperature:", "nan", "finite"]),
        ({"temperature": -0.5}, ["temperature:", "-0.5", "at least 0"]),
        ({"top_p": 0.0}, ["top_p:", "greater than 0", "at most 1"]),
        ({"top_k": -2}, ["top_k:", "-2"]),
        ({"min_p": 1.5}, ["min_p:", "1.5", "at most 1"]),
        ({"repetition_penalty": math.inf}, ["repetition_penalty:", "inf", "finite"]),
        ({"presence_penalty": 2.5}, ["presence_penalty:", "2.5", "at most 2"]),
        ({"logit_bias": {VOCABULARY: 1.0}}, ["logit_bias:", str(VOCABULARY)]),
        ({"stop_token_ids": [VOCABULARY]}, ["stop_token_ids[0]:", str(VOCABULARY)]),
        ({"stop": [""]}, ["stop[0]:", "must not be empty"]),
        ({"n": 0}, ["n:", "from 1 to 16"]),
        ({"n": 17}, ["n:", "17", "from 1 to 16"]),
        ({"top_logprobs": 5}, ["top_logprobs:", "logprobs"]),
        ({"logprobs": True, "top_logprobs": 21}, ["top_logprobs:", "21", "20"]),
        ({"max_tokens": 0}, ["max_tokens:", "at least 1", "0"]),
        ({"max_tokens": CONTEXT}, ["max_tokens:", str(CONTEXT), "maximum model length"]),
    ],
)
def test_sampling(smollm2: Server, sampling: dict[str, Any], words: list[str]) -> None:
    refused(smollm2, pb.GenerateRequest(prompt="a", sampling=pb.Sampling(**sampling)), *words)


def test_a_prompt_of_ten_megabytes(smollm2: Server) -> None:
    request = pb.GenerateRequest(prompt="All work and no play. " * (10 * 2**20 // 22), sampling=greedy(4))
    refused(smollm2, request, "prompt:", "tokens", str(CONTEXT))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x0a\x02\xc3\x28", ["prompt", "UTF-8"]),
        (b"\x1a\x06\x0a\x04\x12\x02\xff\xfe", ["messages.messages.content", "UTF-8"]),
        (b"\x0a\xff", ["request"]),
    ],
)
def test_bytes_that_are_no_request(smollm2: Server, data: bytes, words: list[str]) -> None:
    call = smollm2.channel.unary_stream(f"/{SERVICE}/Generate")
    error = refusal(call(data, timeout=10))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    for word in words:
        assert word in error.details()


def test_an_unknown_model_is_not_found(smollm2: Server) -> None:
    error = refusal(smollm2.stub.Generate(pb.GenerateRequest(prompt="a", model="gpt-5"), timeout=10))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "'gpt-5'" in error.details()
    assert "'smollm2-135m-instruct'" in error.details()


def test_what_l1_can_never_hold_is_refused_at_once(tiny: Server) -> None:
    sampling = greedy(TINY_L1 - 9, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=ids(range(10, 20)), sampling=sampling)
    refused(tiny, request, "max_tokens:", str(TINY_L1 - 9), str(TINY_L1 + 1), "20 L1 pages of 16 tokens")
    request.sampling.max_tokens -= 1
    answer = collect(tiny.stub.Generate(request, timeout=60))
    assert len(answer.choices[0].token_ids) == TINY_L1 - 10


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": "text"}, ["prompt:", "no tokenizer", "token_ids"]),
        (say("user"), ["messages:", "no tokenizer", "token_ids"]),
        ({"token_ids": ids([TINY_VOCABULARY])}, ["token_ids[0]:", str(TINY_VOCABULARY)]),
        ({"token_ids": ids([3] * TINY_L1)}, ["token_ids:", str(TINY_L1), str(TINY_L1 - 1)]),
    ],
)
def test_inputs_of_a_checkpoint_without_a_tokenizer(
    tiny: Server, fields: dict[str, Any], words: list[str]
) -> None:
    refused(tiny, pb.GenerateRequest(sampling=greedy(4), **fields), *words)


def test_stop_strings_without_a_tokenizer(tiny: Server) -> None:
    request = pb.GenerateRequest(token_ids=ids([3]), sampling=greedy(4, stop=["x"]))
    refused(tiny, request, "stop:", "no tokenizer", "stop_token_ids")
