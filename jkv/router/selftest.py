"""Asks an engine that joins for a prompt twice, and compares what it had cached with what the index predicts.

They differ where the two do not mean the same pages: another key scheme, events that do not say the truth.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence

import grpc

from jkv.api import jkv_pb2 as pb
from jkv.router.engines import Engine, SelfTest

_TIMEOUT_S = 30.0
_NEWS_S = 5.0  # for the pages to show in the index
_POLL_S = 0.05
_PAGES = 2

Predict = Callable[[Engine, Sequence[int], str], int]


async def self_test(engine: Engine, predict: Predict) -> SelfTest:
    """`predict`: how many tokens of a prompt the index has, under a salt."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await _test(engine, predict)
    except TimeoutError:
        return _failed(f"no answer in {_TIMEOUT_S:g} s")
    except grpc.aio.AioRpcError as error:
        return _failed(f"{error.code().name}: {error.details()}")


async def _test(engine: Engine, predict: Predict) -> SelfTest:
    answer = await engine.generation.ListModels(pb.ListModelsRequest())
    model = answer.models[0]
    pages = min(_PAGES, (model.max_model_len - 2) // model.page_size)
    if pages < 1:
        return _failed("no prompt has a full page")
    ids = [(7 * i + 1) % model.vocab_size for i in range(pages * model.page_size + 1)]
    salt = f"jkv-self-test-{uuid.uuid4().hex}"
    await _cached(engine, ids, salt)
    deadline = time.monotonic() + _NEWS_S
    while (predicted := predict(engine, ids, salt)) < pages * model.page_size:
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(_POLL_S)
    actual = await _cached(engine, ids, salt)
    tokens = {"predicted_tokens": predicted, "cached_tokens": actual}
    if predicted != actual:
        return _failed(
            f"the index has {predicted} tokens of a prompt, of which {actual} are cached", **tokens
        )
    if not actual:
        return _failed("a prompt that was just computed is not cached", **tokens)
    return SelfTest(verdict="passed", **tokens)


def _failed(why: str, **tokens: int) -> SelfTest:
    return SelfTest(verdict=f"failed: {why}", **tokens)


async def _cached(engine: Engine, ids: Sequence[int], salt: str) -> int:
    """Compute one token; returns how much of the prompt was cached."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids),
        sampling=pb.Sampling(max_tokens=1, temperature=0, ignore_eos=True),
        cache_salt=salt,
        request_id=f"self-test-{uuid.uuid4().hex[:8]}",
    )
    usage = pb.Usage()
    async for chunk in engine.generation.Generate(request):
        if chunk.HasField("usage"):
            usage = chunk.usage
    return usage.cached_tokens
