"""The client for jkv's own gRPC API."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc

from jkv.api import jkv_pb2, jkv_pb2_grpc
from jkv.bench.clients import (
    CONNECT_TIMEOUT_S,
    Chunk,
    RequestFailedError,
    TargetError,
    TargetInfo,
    Usage,
    choose_model,
)
from jkv.bench.load import Prompt


class GrpcClient:
    """One channel to `address` (`HOST:PORT`)."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = jkv_pb2_grpc.GenerationStub(self._channel)

    async def describe(self, model: str | None) -> TargetInfo:
        try:
            answer = await self._stub.ListModels(jkv_pb2.ListModelsRequest(), timeout=CONNECT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise TargetError(f"--target grpc://{self._address}: {_reason(error)}") from error
        cards = {card.name: card for card in answer.models}
        card = cards[choose_model(model, list(cards))]
        return TargetInfo(
            model=card.name,
            vocab_size=card.vocab_size or None,
            max_model_len=card.max_model_len or None,
            page_size=card.page_size or None,
        )

    async def stream(self, model: str, prompt: Prompt, output_len: int) -> AsyncGenerator[Chunk]:
        request = jkv_pb2.GenerateRequest(
            token_ids=jkv_pb2.TokenIds(ids=prompt),
            sampling=jkv_pb2.Sampling(max_tokens=output_len, temperature=0.0, ignore_eos=True),
            model=model,
        )
        try:
            async for message in self._stub.Generate(request):
                yield _chunk(message)
        except grpc.aio.AioRpcError as error:
            raise RequestFailedError(_reason(error)) from error

    async def close(self) -> None:
        await self._channel.close()


def _chunk(message: jkv_pb2.GenerateChunk) -> Chunk:
    usage = None
    if message.HasField("usage"):
        usage = Usage(
            prompt_tokens=message.usage.prompt_tokens,
            completion_tokens=message.usage.completion_tokens,
            cached_tokens=message.usage.cached_tokens,
        )
    return Chunk(tokens=len(message.token_ids), finish_reason=message.finish_reason, usage=usage)


def _reason(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
