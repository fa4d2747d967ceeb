"""The client for jkv's own gRPC API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

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

TIERS = ("l1", "l2", "l3", "peer")


class GrpcClient:
    """One channel to `address` (`HOST:PORT`)."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.channel = grpc.aio.insecure_channel(address)
        self._stub = jkv_pb2_grpc.GenerationStub(self.channel)

    async def describe(self, model: str | None) -> TargetInfo:
        try:
            answer = await self._stub.ListModels(jkv_pb2.ListModelsRequest(), timeout=CONNECT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise TargetError(f"--target grpc://{self._address}: {reason(error)}") from error
        cards = {card.name: card for card in answer.models}
        card = cards[choose_model(model, list(cards))]
        return TargetInfo(
            model=card.name,
            vocab_size=card.vocab_size or None,
            max_model_len=card.max_model_len or None,
            page_size=card.page_size or None,
        )

    async def stream(
        self, model: str, prompt: Prompt, output_len: int, *, ignore_eos: bool = True
    ) -> AsyncGenerator[Chunk]:
        request = jkv_pb2.GenerateRequest(
            token_ids=jkv_pb2.TokenIds(ids=prompt),
            sampling=jkv_pb2.Sampling(max_tokens=output_len, temperature=0.0, ignore_eos=ignore_eos),
            model=model,
        )
        try:
            async for message in self._stub.Generate(request):
                yield _chunk(message)
        except grpc.aio.AioRpcError as error:
            raise RequestFailedError(reason(error)) from error

    async def tokenize(self, messages: Sequence[tuple[str, str]]) -> Prompt:
        rendered = [jkv_pb2.Message(role=role, content=content) for role, content in messages]
        request = jkv_pb2.TokenizeRequest(messages=jkv_pb2.Messages(messages=rendered))
        try:
            return tuple((await self._stub.Tokenize(request)).ids)
        except grpc.aio.AioRpcError as error:
            raise TargetError(f"--target grpc://{self._address}: Tokenize: {reason(error)}") from error

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        request = jkv_pb2.DetokenizeRequest(ids=token_ids, skip_special_tokens=True)
        try:
            return (await self._stub.Detokenize(request)).text
        except grpc.aio.AioRpcError as error:
            raise TargetError(f"--target grpc://{self._address}: Detokenize: {reason(error)}") from error

    async def close(self) -> None:
        await self.channel.close()


def _chunk(message: jkv_pb2.GenerateChunk) -> Chunk:
    usage = None
    if message.HasField("usage"):
        usage = Usage(
            prompt_tokens=message.usage.prompt_tokens,
            completion_tokens=message.usage.completion_tokens,
            cached_tokens=message.usage.cached_tokens,
            cached_by_tier={tier: getattr(message.usage.cached_by_tier, tier) for tier in TIERS},
        )
    token_ids = tuple(message.token_ids)
    return Chunk(
        tokens=len(token_ids),
        token_ids=token_ids,
        finish_reason=message.finish_reason,
        usage=usage,
    )


def reason(error: grpc.aio.AioRpcError) -> str:
    """A failed call in one line."""
    return f"{error.code().name}: {error.details()}"
