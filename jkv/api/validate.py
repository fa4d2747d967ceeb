"""From an API request to engine requests. Pure: what is refused here never reaches the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from jkv.api import jkv_pb2 as pb
from jkv.api.sampling import check_prompt_length, sampling_params, sequence_count
from jkv.cache.peers import PeerHint
from jkv.engine.request import EngineInfo, EngineRequest, SamplingParams
from jkv.errors import InvalidRequestError, UnknownModelError

# Messages with an `input` of prompt or messages, and but for the second one token_ids.
PromptRequest = pb.GenerateRequest | pb.TokenizeRequest | pb.Prefix

MAX_REQUEST_ID_LENGTH = 128
MAX_CACHE_SALT_LENGTH = 256
MAX_ADDRESS_LENGTH = 512


def check_model(name: str, served_name: str) -> None:
    """Accept the served model's name, or none at all.

    Raises:
        UnknownModelError: any other name.
    """
    if name and name != served_name:
        raise UnknownModelError("model", f"{name!r} is not served here; this server has {served_name!r}")


def check_input(request: PromptRequest, *, has_tokenizer: bool) -> str:
    """Which input field a request brings, checked as far as that needs no tokenizer.

    Raises:
        InvalidRequestError: no input, an empty prompt, or text for a model without a tokenizer.
    """
    field = request.WhichOneof("input")
    if field is None:
        names = " or ".join(item.name for item in request.DESCRIPTOR.oneofs_by_name["input"].fields)
        raise InvalidRequestError("input", f"one of {names} is required")
    if field != "token_ids" and not has_tokenizer:
        raise InvalidRequestError(field, "this model has no tokenizer; send token_ids")
    if field == "prompt" and not request.prompt:
        raise InvalidRequestError("prompt", "must not be empty")
    return field


def check_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that the model has no embedding for.

    Raises:
        InvalidRequestError: names the first such position, its id and the limit.
    """
    if ids and max(ids) >= vocab_size:
        position = next(index for index, token in enumerate(ids) if token >= vocab_size)
        raise InvalidRequestError(
            f"{field}[{position}]", f"must be below the vocabulary size {vocab_size}, got {ids[position]}"
        )


def check_cache_salt(salt: str, field: str = "cache_salt") -> None:
    """Refuse a salt that is too long.

    Raises:
        InvalidRequestError: names the field, its length and the limit.
    """
    _check_text(field, salt, MAX_CACHE_SALT_LENGTH)


def engine_requests(
    request: pb.GenerateRequest,
    prompt_ids: tuple[int, ...],
    info: EngineInfo,
    *,
    new_id: str,
    live_ids: Collection[str],
    deadline: float | None = None,
) -> tuple[EngineRequest, ...]:
    """The `n` sequences of one request, in order of their index.

    `prompt_ids` is the tokenized input, `new_id` names the request if it brings no id, `live_ids` are the
    engine requests that run now. Sequences of one request differ by a `-index` suffix of their id, and by
    `seed + index`.

    Raises:
        InvalidRequestError: names the field, its value and the limit.
    """
    field = request.WhichOneof("input") or "input"
    if not prompt_ids:
        raise InvalidRequestError(field, "must have at least one token")
    check_prompt_length(field, len(prompt_ids), info)
    check_token_ids(field, prompt_ids, info.vocab_size)
    check_cache_salt(request.cache_salt)
    sampling = sampling_params(request.sampling, info, len(prompt_ids))
    count = sequence_count(request.sampling)
    resumed = _resumed(request, field, count, sampling, info)
    ids = _request_ids(request.request_id, new_id, count, live_ids)
    return tuple(
        EngineRequest(
            request_id=ids[index],
            prompt_ids=prompt_ids,
            sampling=dataclasses.replace(sampling, seed=_offset_seed(sampling.seed, index)),
            cache_salt=request.cache_salt,
            no_cache=request.no_cache,
            priority=request.priority,
            deadline=deadline,
            resumed=resumed,
            peer=_peer(request),
        )
        for index in range(count)
    )


def _resumed(
    request: pb.GenerateRequest, field: str, count: int, sampling: SamplingParams, info: EngineInfo
) -> tuple[int, ...]:
    """The tokens of an answer to go on with, where it can be gone on with exactly."""
    ids, name = tuple(request.resume_token_ids), "resume_token_ids"
    if not ids:
        return ids
    if field != "token_ids":
        raise InvalidRequestError(name, f"needs token_ids as the input, got {field}")
    if count != 1:
        raise InvalidRequestError(name, f"needs sampling.n to be 1, got {count}")
    if sampling.temperature > 0 and sampling.seed is None:
        raise InvalidRequestError(name, "needs sampling.seed, or a temperature of 0")
    if len(ids) > sampling.max_tokens:
        raise InvalidRequestError(
            name, f"must have at most sampling.max_tokens {sampling.max_tokens} ids, has {len(ids)}"
        )
    check_token_ids(name, ids, info.vocab_size)
    return ids


def _peer(request: pb.GenerateRequest) -> PeerHint | None:
    """Where to fetch pages from; an address that is no engine of the cluster is not asked."""
    if not request.HasField("peer"):
        return None
    _check_text("peer.address", request.peer.address, MAX_ADDRESS_LENGTH)
    return PeerHint(address=request.peer.address, pages=request.peer.pages)


def _offset_seed(seed: int | None, index: int) -> int | None:
    return None if seed is None else (seed + index) % 2**64


def _request_ids(asked: str, new_id: str, count: int, live_ids: Collection[str]) -> tuple[str, ...]:
    _check_text("request_id", asked, MAX_REQUEST_ID_LENGTH)
    if not asked.isprintable():  # ids go to the log, a line each
        raise InvalidRequestError("request_id", f"must be printable, got {asked!r}")
    base = asked or new_id
    ids = (base,) if count == 1 else tuple(f"{base}-{index}" for index in range(count))
    for one in ids:
        if one in live_ids:
            raise InvalidRequestError("request_id", f"{one!r} is running already")
    return ids


def _check_text(field: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise InvalidRequestError(field, f"must have at most {limit} characters, has {len(text)}")
