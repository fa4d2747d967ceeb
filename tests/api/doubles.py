"""What the API tests put at its borders: a scripted Generator and a byte-level tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jkv.engine.request import CachedByTier, EngineInfo, EngineRequest, FinishReason, TokenOutput
from jkv.text.parts import TokenizerParts
from jkv.text.tokenizer import Tokenizer

EOS = 256
VOCAB_SIZE = 257

INFO = EngineInfo(
    model="bytes",
    vocab_size=VOCAB_SIZE,
    max_model_len=1024,
    page_size=8,
    l1_pages=1000,
    eos_token_ids=frozenset({EOS}),
)

Script = Callable[[EngineRequest], Sequence[TokenOutput]]


def byte_tokenizer() -> Tokenizer:
    """One token a byte, in byte order, and the special token `<eos>`; spaces and newlines as they are."""
    alphabet = _byte_level_alphabet()
    vocabulary = {character: byte for byte, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(TokenizerParts(backend=backend, bos_token=None, eos_token="<eos>", chat_template=None))


def _byte_level_alphabet() -> list[str]:
    """The character that GPT-2's byte-level scheme writes for each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def echo(request: EngineRequest) -> list[TokenOutput]:
    """The prompt again, a token at a time, up to `max_tokens`; then the end token if there is room."""
    ids = request.prompt_ids[: request.sampling.max_tokens]
    cached = CachedByTier(l1=len(request.prompt_ids) // 8 * 8)
    outputs = [TokenOutput(token_ids=(token,), cached=cached) for token in ids]
    if len(ids) < request.sampling.max_tokens:
        end = TokenOutput(token_ids=(EOS,), finish_reason=FinishReason.STOP, cached=cached)
    else:
        end = TokenOutput(finish_reason=FinishReason.LENGTH, cached=cached)
    return [*outputs, end]


class ScriptedGenerator:
    """Plays a script for each request and keeps account of what was started and closed.

    After `hold` outputs of a request it waits for `release`, as a busy engine would. `failure` is raised at
    the start.
    """

    def __init__(self, script: Script = echo, *, info: EngineInfo = INFO, hold: int | None = None) -> None:
        self.info = info
        self.script = script
        self.hold = hold
        self.release = asyncio.Event()
        self.failure: Exception | None = None
        self.requests: list[EngineRequest] = []
        self.closed: list[str] = []
        self.any_closed = asyncio.Event()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenOutput, None]:
        self.requests.append(request)
        try:
            if self.failure is not None:
                raise self.failure
            for position, output in enumerate(self.script(request)):
                if position == self.hold:
                    await self.release.wait()
                yield output
                await asyncio.sleep(0)
        finally:
            self.closed.append(request.request_id)
            self.any_closed.set()
