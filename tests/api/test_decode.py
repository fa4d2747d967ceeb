from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.api import jkv_pb2 as pb
from jkv.api.decode import Malformed, deserializer

parse = deserializer(pb.GenerateRequest)

_BAD = b"\xc3\x28"


def _with_bad_text(request: pb.GenerateRequest) -> bytes:
    """The request's bytes with every `??` replaced by two bytes that are not UTF-8."""
    return request.SerializeToString().replace(b"??", _BAD)


def test_valid_bytes_parse() -> None:
    request = pb.GenerateRequest(prompt="hé", sampling=pb.Sampling(n=2, stop=["x"]))
    assert parse(request.SerializeToString()) == request


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(prompt="a??b"), "prompt"),
        (pb.GenerateRequest(prompt="ok", cache_salt="??"), "cache_salt"),
        (pb.GenerateRequest(sampling=pb.Sampling(stop=["ok", "??"])), "sampling.stop"),
        (
            pb.GenerateRequest(messages=pb.Messages(messages=[pb.Message(role="user", content="??")])),
            "messages.messages.content",
        ),
    ],
)
def test_a_string_that_is_not_utf8_is_named(request_: pb.GenerateRequest, field: str) -> None:
    assert parse(_with_bad_text(request_)) == Malformed(field=field, reason="is not valid UTF-8")


def test_bytes_that_are_no_message_say_so() -> None:
    failure = parse(b"\x0a\x64abc")
    assert failure == Malformed(field="request", reason="is not a valid jkv.v1.GenerateRequest message")


@given(st.binary(max_size=64))
def test_no_bytes_raise(data: bytes) -> None:
    assert isinstance(parse(data), pb.GenerateRequest | Malformed)
