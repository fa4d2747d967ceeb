"""From the API's sampling fields to the engine's, every limit stated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from jkv.api import jkv_pb2 as pb
from jkv.engine.request import EngineInfo, SamplingParams
from jkv.errors import InvalidRequestError

MAX_TEMPERATURE = 100.0
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_TOP_LOGPROBS = 20
MAX_N = 16

_NumberField = Literal[
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
]


def sampling_params(sampling: pb.Sampling, info: EngineInfo, prompt_tokens: int) -> SamplingParams:
    """Check the sampling of a request whose prompt has `prompt_tokens` tokens; `stop` and `n` are read apart.

    Raises:
        InvalidRequestError: names the field, its value and the limit.
    """
    return SamplingParams(
        max_tokens=_max_tokens(sampling, info, prompt_tokens),
        temperature=_number(sampling, "temperature", default=1.0, low=0.0, high=MAX_TEMPERATURE),
        top_p=_number(sampling, "top_p", default=1.0, above=0.0, high=1.0),
        top_k=_top_k(sampling),
        min_p=_number(sampling, "min_p", default=0.0, low=0.0, high=1.0),
        seed=sampling.seed if sampling.HasField("seed") else None,
        stop_token_ids=_stop_token_ids(sampling, info.vocab_size),
        ignore_eos=sampling.ignore_eos,
        repetition_penalty=_number(sampling, "repetition_penalty", default=1.0, above=0.0),
        presence_penalty=_number(sampling, "presence_penalty", default=0.0, low=-2.0, high=2.0),
        frequency_penalty=_number(sampling, "frequency_penalty", default=0.0, low=-2.0, high=2.0),
        logit_bias=_logit_bias(sampling.logit_bias, info.vocab_size),
        logprobs=sampling.logprobs,
        top_logprobs=_top_logprobs(sampling),
    )


def stop_strings(sampling: pb.Sampling, *, has_tokenizer: bool) -> tuple[str, ...]:
    """Check the stop strings; a model without a tokenizer has no text to look for them in.

    Raises:
        InvalidRequestError: too many, too long, empty, or no tokenizer.
    """
    stops = tuple(sampling.stop)
    if stops and not has_tokenizer:
        raise InvalidRequestError("stop", "this model has no tokenizer; use stop_token_ids")
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequestError("stop", f"at most {MAX_STOP_STRINGS} strings are allowed, got {len(stops)}")
    for position, text in enumerate(stops):
        if not text:
            raise InvalidRequestError(f"stop[{position}]", "must not be empty")
        if len(text) > MAX_STOP_LENGTH:
            raise InvalidRequestError(
                f"stop[{position}]", f"must have at most {MAX_STOP_LENGTH} characters, has {len(text)}"
            )
    return stops


def sequence_count(sampling: pb.Sampling) -> int:
    """How many sequences to sample from the prompt.

    Raises:
        InvalidRequestError: `n` out of range.
    """
    count = sampling.n if sampling.HasField("n") else 1
    if not 1 <= count <= MAX_N:
        raise InvalidRequestError("n", f"must be from 1 to {MAX_N}, got {count}")
    return count


def check_prompt_length(field: str, prompt_tokens: int, info: EngineInfo) -> None:
    """Refuse a prompt that leaves no room for one generated token.

    Raises:
        InvalidRequestError: states the prompt's tokens and the limit that it breaks.
    """
    room, reason = _room(info)
    if prompt_tokens >= room:
        raise InvalidRequestError(
            field, f"has {prompt_tokens} tokens; at most {room - 1} leave room for a completion ({reason})"
        )


def _room(info: EngineInfo) -> tuple[int, str]:
    """Tokens that prompt and completion may have together, and which limit says so."""
    if info.max_tokens_in_l1 < info.max_model_len:
        pages = f"{info.l1_pages} L1 pages of {info.page_size} tokens"
        return info.max_tokens_in_l1, f"the {pages} hold {info.max_tokens_in_l1}"
    return info.max_model_len, f"the maximum model length is {info.max_model_len}"


def _max_tokens(sampling: pb.Sampling, info: EngineInfo, prompt_tokens: int) -> int:
    room, reason = _room(info)
    if not sampling.HasField("max_tokens"):
        return room - prompt_tokens
    asked = sampling.max_tokens
    if asked < 1:
        raise InvalidRequestError("max_tokens", f"must be at least 1, got {asked}")
    if prompt_tokens + asked > room:
        raise InvalidRequestError(
            "max_tokens",
            f"{asked} after a prompt of {prompt_tokens} tokens make {prompt_tokens + asked}, but {reason}; "
            f"at most {room - prompt_tokens} fit",
        )
    return asked


def _number(
    sampling: pb.Sampling,
    field: _NumberField,
    *,
    default: float,
    low: float = -math.inf,
    above: float = -math.inf,
    high: float = math.inf,
) -> float:
    """A finite float in `[low, high]` that is greater than `above`."""
    if not sampling.HasField(field):
        return default
    value = getattr(sampling, field)
    if not math.isfinite(value):
        raise InvalidRequestError(field, f"must be a finite number, got {value}")
    if not (low <= value <= high and value > above):
        bounds = [
            (above, f"greater than {above:g}"),
            (low, f"at least {low:g}"),
            (high, f"at most {high:g}"),
        ]
        allowed = " and ".join(text for bound, text in bounds if math.isfinite(bound))
        raise InvalidRequestError(field, f"must be {allowed}, got {value:g}")
    return value


def _top_k(sampling: pb.Sampling) -> int:
    if sampling.top_k < -1:
        raise InvalidRequestError("top_k", f"must be -1 or 0 (off) or more, got {sampling.top_k}")
    return max(sampling.top_k, 0)


def _stop_token_ids(sampling: pb.Sampling, vocab_size: int) -> frozenset[int]:
    for position, token in enumerate(sampling.stop_token_ids):
        if token >= vocab_size:
            raise InvalidRequestError(
                f"stop_token_ids[{position}]", f"must be below the vocabulary size {vocab_size}, got {token}"
            )
    return frozenset(sampling.stop_token_ids)


def _logit_bias(bias: Mapping[int, float], vocab_size: int) -> dict[int, float]:
    if len(bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidRequestError(
            "logit_bias", f"at most {MAX_LOGIT_BIAS_ENTRIES} entries are allowed, got {len(bias)}"
        )
    for token, value in bias.items():
        if token >= vocab_size:
            raise InvalidRequestError(
                "logit_bias", f"token ids must be below the vocabulary size {vocab_size}, got {token}"
            )
        if not -MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias[{token}]",
                f"must be from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}, got {value:g}",
            )
    return dict(bias)


def _top_logprobs(sampling: pb.Sampling) -> int:
    count = sampling.top_logprobs
    if count > MAX_TOP_LOGPROBS:
        raise InvalidRequestError("top_logprobs", f"must be from 0 to {MAX_TOP_LOGPROBS}, got {count}")
    if count and not sampling.logprobs:
        raise InvalidRequestError("top_logprobs", f"{count} needs logprobs to be true")
    return count
