from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.api import jkv_pb2 as pb
from jkv.api.sampling import sampling_params, stop_strings
from jkv.api.validate import check_input, check_model, check_token_ids, engine_requests
from jkv.engine.request import EngineInfo, EngineRequest
from jkv.errors import InvalidRequestError, UnknownModelError

INFO = EngineInfo(
    model="m", vocab_size=100, max_model_len=64, page_size=8, l1_pages=100, eos_token_ids=frozenset({2})
)
SMALL_L1 = EngineInfo(
    model="m", vocab_size=100, max_model_len=64, page_size=8, l1_pages=4, eos_token_ids=frozenset({2})
)


def _requests(
    sampling: dict[str, Any] | None = None,
    *,
    prompt: tuple[int, ...] = (1, 2, 3),
    info: EngineInfo = INFO,
    live: frozenset[str] = frozenset(),
    **fields: Any,
) -> tuple[EngineRequest, ...]:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt), sampling=pb.Sampling(**(sampling or {})), **fields
    )
    return engine_requests(request, prompt, info, new_id="new", live_ids=live)


def test_an_empty_sampling_gives_the_documented_defaults() -> None:
    (request,) = _requests()
    sampling = request.sampling
    assert request.request_id == "new"
    assert sampling.max_tokens == 61
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (
        1.0,
        0.0,
        0.0,
    )
    assert (sampling.seed, sampling.logprobs, sampling.top_logprobs) == (None, False, 0)


def test_every_sampling_field_reaches_the_engine() -> None:
    given_fields = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "seed": 11,
        "stop_token_ids": [5, 6],
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 2.0,
        "logit_bias": {3: -100.0},
        "logprobs": True,
        "top_logprobs": 20,
        "ignore_eos": True,
    }
    (request,) = _requests(given_fields, cache_salt="s", no_cache=True, request_id="r", priority=-4)
    for name, value in given_fields.items():
        assert getattr(request.sampling, name) == (frozenset(value) if isinstance(value, list) else value)
    assert (request.cache_salt, request.no_cache, request.request_id, request.priority) == (
        "s",
        True,
        "r",
        -4,
    )


@pytest.mark.parametrize(
    ("sampling", "field", "words"),
    [
        ({"max_tokens": 0}, "max_tokens", ["at least 1", "got 0"]),
        ({"max_tokens": 62}, "max_tokens", ["62", "65", "maximum model length is 64", "at most 61 fit"]),
        ({"max_tokens": 2**32 - 1}, "max_tokens", ["at most 61 fit"]),
        ({"temperature": -0.1}, "temperature", ["at least 0 and at most 100", "-0.1"]),
        ({"temperature": 100.5}, "temperature", ["at most 100", "100.5"]),
        ({"temperature": math.nan}, "temperature", ["finite", "nan"]),
        ({"top_p": 0.0}, "top_p", ["greater than 0 and at most 1", "got 0"]),
        ({"top_p": 1.5}, "top_p", ["1.5"]),
        ({"top_k": -2}, "top_k", ["-2"]),
        ({"min_p": 1.01}, "min_p", ["at most 1", "1.01"]),
        ({"repetition_penalty": 0.0}, "repetition_penalty", ["greater than 0", "got 0"]),
        ({"repetition_penalty": math.inf}, "repetition_penalty", ["finite", "inf"]),
        ({"presence_penalty": 2.5}, "presence_penalty", ["at least -2 and at most 2", "2.5"]),
        ({"frequency_penalty": -3.0}, "frequency_penalty", ["-3"]),
        ({"logit_bias": {100: 1.0}}, "logit_bias", ["vocabulary size 100", "got 100"]),
        ({"logit_bias": {7: 101.0}}, "logit_bias[7]", ["from -100 to 100", "101"]),
        ({"logit_bias": {7: math.nan}}, "logit_bias[7]", ["nan"]),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias", ["at most 1024", "1025"]),
        ({"stop_token_ids": [1, 100]}, "stop_token_ids[1]", ["vocabulary size 100", "got 100"]),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", ["0 to 20", "21"]),
        ({"top_logprobs": 1}, "top_logprobs", ["needs logprobs"]),
        ({"n": 0}, "n", ["from 1 to 16", "got 0"]),
        ({"n": 17}, "n", ["from 1 to 16", "got 17"]),
    ],
)
def test_sampling_errors_name_field_value_and_limit(
    sampling: dict[str, Any], field: str, words: list[str]
) -> None:
    with pytest.raises(InvalidRequestError) as error:
        _requests(sampling)
    assert error.value.field == field
    for word in words:
        assert word in str(error.value)


@given(
    st.sampled_from(
        ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
    ),
    st.floats(width=32),
)
def test_no_float_passes_out_of_its_range(field: str, value: float) -> None:
    allowed = {
        "temperature": 0 <= value <= 100,
        "top_p": 0 < value <= 1,
        "min_p": 0 <= value <= 1,
        "repetition_penalty": 0 < value < math.inf,
        "presence_penalty": -2 <= value <= 2,
        "frequency_penalty": -2 <= value <= 2,
    }[field]
    fields: dict[str, Any] = {field: value}
    sampling = pb.Sampling(**fields)
    if allowed:
        assert getattr(sampling_params(sampling, INFO, 3), field) == value
    else:
        with pytest.raises(InvalidRequestError) as error:
            sampling_params(sampling, INFO, 3)
        assert error.value.field == field


def test_a_prompt_must_leave_room_for_one_token() -> None:
    assert _requests(prompt=(1,) * 63)[0].sampling.max_tokens == 1
    with pytest.raises(InvalidRequestError, match=r"token_ids: has 64 tokens; at most 63.*length is 64"):
        _requests(prompt=(1,) * 64)


def test_l1_limits_what_can_run_at_all() -> None:
    assert _requests(info=SMALL_L1)[0].sampling.max_tokens == 29
    with pytest.raises(InvalidRequestError, match="4 L1 pages of 8 tokens hold 32; at most 29 fit"):
        _requests({"max_tokens": 30}, info=SMALL_L1)
    with pytest.raises(InvalidRequestError, match="has 40 tokens; at most 31"):
        _requests(prompt=(1,) * 40, info=SMALL_L1)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="token_ids: must have at least one token"):
        _requests(prompt=())


def test_token_ids_out_of_range_name_the_position() -> None:
    with pytest.raises(InvalidRequestError, match=r"token_ids\[2\]: .*vocabulary size 100, got 4294967295"):
        _requests(prompt=(1, 99, 2**32 - 1, 100))
    check_token_ids("ids", (), 1)


def test_n_sequences_differ_in_id_and_seed() -> None:
    requests = _requests({"n": 3, "seed": 2**64 - 2}, request_id="r")
    assert [request.request_id for request in requests] == ["r-0", "r-1", "r-2"]
    assert [request.sampling.seed for request in requests] == [2**64 - 2, 2**64 - 1, 0]
    assert {request.sampling.seed for request in _requests({"n": 3})} == {None}


@pytest.mark.parametrize(("sampling", "live"), [({}, "r"), ({"n": 2}, "r-1")])
def test_an_id_that_runs_already_is_refused(sampling: dict[str, Any], live: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"request_id: '{live}' is running already"):
        _requests(sampling, request_id="r", live=frozenset({live}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": "a" * 129}, "request_id: must have at most 128 characters, has 129"),
        ({"request_id": "a\nb"}, "request_id: must be printable"),
        ({"cache_salt": "a" * 257}, "cache_salt: must have at most 256 characters, has 257"),
    ],
)
def test_strings_have_limits(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        _requests(**fields)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (pb.GenerateRequest(), "input: one of prompt or token_ids or messages is required"),
        (pb.TokenizeRequest(), "input: one of prompt or messages is required"),
        (pb.GenerateRequest(prompt=""), "prompt: must not be empty"),
    ],
)
def test_inputs_must_be_there(request_: pb.GenerateRequest | pb.TokenizeRequest, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_input(request_, has_tokenizer=True)


def test_text_needs_a_tokenizer() -> None:
    messages = pb.Messages(messages=[pb.Message(role="user", content="hi")])
    for request in (pb.GenerateRequest(prompt="x"), pb.GenerateRequest(messages=messages)):
        with pytest.raises(InvalidRequestError, match="no tokenizer; send token_ids"):
            check_input(request, has_tokenizer=False)
        assert check_input(request, has_tokenizer=True) in ("prompt", "messages")
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]))
    assert check_input(ids, has_tokenizer=False) == "token_ids"


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        (["x"] * 17, "stop: at most 16 strings are allowed, got 17"),
        (["x", ""], r"stop\[1\]: must not be empty"),
        (["x" * 1025], r"stop\[0\]: must have at most 1024 characters, has 1025"),
    ],
)
def test_stop_strings_have_limits(stops: list[str], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        stop_strings(pb.Sampling(stop=stops), has_tokenizer=True)


def test_stop_strings_need_a_tokenizer() -> None:
    assert stop_strings(pb.Sampling(stop=["a", "b"]), has_tokenizer=True) == ("a", "b")
    assert stop_strings(pb.Sampling(), has_tokenizer=False) == ()
    with pytest.raises(InvalidRequestError, match="stop: this model has no tokenizer; use stop_token_ids"):
        stop_strings(pb.Sampling(stop=["a"]), has_tokenizer=False)


def test_only_the_served_model_is_known() -> None:
    check_model("", "m")
    check_model("m", "m")
    with pytest.raises(UnknownModelError, match="model: 'x' is not served here; this server has 'm'"):
        check_model("x", "m")


@pytest.mark.parametrize(
    ("fields", "sampling", "message"),
    [
        ({"prompt": "a"}, {}, "needs token_ids as the input, got prompt"),
        ({}, {"n": 2}, "needs sampling.n to be 1, got 2"),
        ({}, {"temperature": 0.5}, "needs sampling.seed"),
        ({}, {"max_tokens": 1}, "at most sampling.max_tokens 1 ids, has 2"),
        ({"resume_token_ids": [1, 10**6]}, {}, r"resume_token_ids\[1\]: must be below"),
    ],
)
def test_an_answer_can_only_be_resumed_exactly(
    fields: dict[str, Any], sampling: dict[str, Any], message: str
) -> None:
    given_fields = {"token_ids": pb.TokenIds(ids=[1]), "resume_token_ids": [1, 2], **fields}
    if "prompt" in given_fields:
        del given_fields["token_ids"]
    request = pb.GenerateRequest(
        **given_fields, sampling=pb.Sampling(**{"temperature": 0, "max_tokens": 5, **sampling})
    )
    with pytest.raises(InvalidRequestError, match=message):
        engine_requests(request, (1,), INFO, new_id="new", live_ids=())
