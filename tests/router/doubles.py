"""An engine without a model, behind the real services on a real socket, here or in a process of its own.

Its answers depend on the prompt, the seed and every token before, so that an answer with which another double
goes on is right only if it was told all of that.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Any

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.api.listening import Listener
from jkv.api.serving import answering
from jkv.api.stream import SequenceStream
from jkv.cache.keys import page_keys, request_root
from jkv.cache.replica import digest_of
from jkv.engine.request import CachedByTier, FinishReason, Logprob, TokenOutput
from jkv.errors import OverloadedError
from jkv.text.detokenize import Detokenizer
from tests.api.doubles import EOS, VOCAB_SIZE, byte_tokenizer

MODEL_ROOT = b"m" * 16
PAGE_SIZE = 8
_PLAIN = b"abcdefghijklmnopqrstuvwxyz    "
_LEAD = 0xC3  # of a character of two bytes: an answer may be cut inside one


def next_token(tokens: Sequence[int], position: int, seed: int, *, ends: bool) -> int:
    """What the double's model says after all these tokens."""
    hashed = blake2b(repr((list(tokens), position, seed)).encode(), digest_size=8).digest()
    if tokens[-1] == _LEAD:
        return 0x80 + hashed[0] % 0x40
    if ends and position > 15 and hashed[1] < 30:
        return EOS
    return _LEAD if hashed[2] < 50 else _PLAIN[hashed[3] % len(_PLAIN)]


class Double(pb_grpc.GenerationServicer, pb_grpc.ReplicaServicer):
    """Knobs may be changed while it serves."""

    def __init__(self, id: str = "one", model: str = "bytes", root: bytes = MODEL_ROOT) -> None:
        self.description = pb.EngineDescription(
            id=id,
            model=model,
            model_root=root,
            page_size=PAGE_SIZE,
            page_bytes=64,
            tiers=["l1", "l2"],
            version="0",
        )
        self.incarnation = uuid.uuid4().hex
        self.load = pb.EngineLoad(max_num_seqs=4, prefill_tokens_per_s=1000)
        self.pages: dict[str, set[bytes]] = {"l1": set(), "l2": set()}
        self.number = 0
        self.heartbeat = 0.05
        self.requests: list[pb.GenerateRequest] = []
        self.deadlines: list[float | None] = []
        self.tokenized: list[pb.TokenizeRequest] = []
        self.cancelled = asyncio.Event()
        self.hold_after: int | None = None  # chunks, after which a Generate waits for `released`
        self.held = asyncio.Event()
        self.released = asyncio.Event()
        self.silent = asyncio.Event()  # set: sends nothing at all, as if stopped
        self.full = False
        self.failing = False
        self.end: FinishReason | None = None  # of an engine that gives up where it is held
        self.tokenizer = byte_tokenizer()
        self._followers: list[asyncio.Queue[pb.WatchEvent]] = []
        self._listener: Listener | None = None

    # -- life

    async def start(self, port: int = 0) -> str:
        self._listener = Listener()
        self._listener.add("Generation", self)
        self._listener.add("Replica", self)
        port = await self._listener.start("127.0.0.1", port)
        await self._listener.serving(True)
        self.address = f"127.0.0.1:{port}"
        return self.address

    async def kill(self) -> None:
        """End every call and close the socket, without a word."""
        assert self._listener is not None
        await self._listener._server.stop(None)

    async def restart(self) -> None:
        """Another process at the same address."""
        self.incarnation, self.number = uuid.uuid4().hex, 0
        self.pages = {"l1": set(), "l2": set()}
        self._followers = []
        await self.start(int(self.address.rpartition(":")[2]))

    # -- the cache

    def change(self, tier: str, added: Sequence[bytes] = (), removed: Sequence[bytes] = ()) -> pb.WatchEvent:
        """Change what is cached and return the event that tells of it."""
        self.pages[tier] = (self.pages[tier] - set(removed)) | set(added)
        self.number += 1
        change = pb.PageChange(tier=tier, added=b"".join(added), removed=b"".join(removed))
        return pb.WatchEvent(
            incarnation=self.incarnation, number=self.number, changes=[change], load=self.load
        )

    def publish(self, *events: pb.WatchEvent) -> None:
        for follower in self._followers:
            for event in events:
                follower.put_nowait(event)

    def keys(self, ids: Sequence[int], salt: str = "") -> list[bytes]:
        return page_keys(request_root(self.description.model_root, cache_salt=salt), ids, PAGE_SIZE)

    def _snapshot(self) -> list[pb.WatchEvent]:
        """In two parts, as large ones are."""
        parts = [pb.PageChange(tier=tier, added=b"".join(keys)) for tier, keys in self.pages.items()]
        return [
            pb.WatchEvent(
                incarnation=self.incarnation,
                number=self.number,
                reset=i == 0,
                partial=i < len(parts) - 1,
                changes=[part],
                load=self.load,
            )
            for i, part in enumerate(parts)
        ]

    # -- services

    @answering
    async def Watch(self, request: pb.WatchRequest, context: Any) -> None:
        queue: asyncio.Queue[pb.WatchEvent] = asyncio.Queue()
        self._followers.append(queue)
        events = self._snapshot()
        if (request.incarnation, request.after) == (self.incarnation, self.number):
            events = [pb.WatchEvent(incarnation=self.incarnation, number=self.number, load=self.load)]
        events[0].engine.CopyFrom(self.description)
        for event in events:
            await self._write(context, event)
        while True:
            try:
                event = await asyncio.wait_for(queue.get(), self.heartbeat)
            except TimeoutError:
                event = pb.WatchEvent(incarnation=self.incarnation, number=self.number, load=self.load)
            await self._write(context, event)

    @answering
    async def Digest(self, request: pb.DigestRequest, context: Any) -> pb.DigestResponse:
        tiers = []
        for tier, keys in self.pages.items():
            digest = digest_of(list(keys))
            tiers.append(pb.TierDigest(tier=tier, pages=digest.pages, checksum=digest.checksum))
        return pb.DigestResponse(incarnation=self.incarnation, number=self.number, tiers=tiers)

    @answering
    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        self.tokenized.append(request)
        text = request.prompt or "".join(m.content for m in request.messages.messages)
        return pb.TokenizeResponse(ids=self.tokenizer.encode(text, add_special_tokens=True))

    @answering
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text=self.tokenizer.decode(request.ids, skip_special_tokens=True))

    @answering
    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        card = pb.ModelCard(
            name=self.description.model, max_model_len=1024, vocab_size=VOCAB_SIZE, page_size=PAGE_SIZE
        )
        return pb.ListModelsResponse(models=[card])

    @answering
    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        self.requests.append(request)
        self.deadlines.append(context.time_remaining())
        if self.full:
            raise OverloadedError("the queue is full", 0.3)
        if self.failing:
            raise RuntimeError("out of order")
        self.load.running += 1
        try:
            await self._generate(request, context)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.load.running -= 1

    async def _generate(self, request: pb.GenerateRequest, context: Any) -> None:
        ids, written = list(request.token_ids.ids), 0
        cached = self._match(request)
        added = [key for key in self.keys(ids, request.cache_salt) if key not in self.pages["l1"]]
        if added and not request.no_cache:
            self.publish(self.change("l1", added))
        streams = [self._stream(request, index) for index in range(request.sampling.n or 1)]
        first = dict.fromkeys(streams, True)
        while live := [stream for stream in streams if stream.finish_reason is None]:
            for stream in live:
                if written == self.hold_after:
                    self.held.set()
                    await self.released.wait()
                    if self.end is not None:
                        stream.push(TokenOutput(finish_reason=self.end, error="out of order"))
                stream.advance(cached) if stream.finish_reason is None else None
                for chunk in stream.take():
                    if first[stream]:
                        chunk.cached_by_tier.l1, first[stream] = cached.l1, False
                    await self._write(context, chunk)
                    written += 1
                if stream.finish_reason is FinishReason.ERROR:
                    raise RuntimeError("out of order")

    def _stream(self, request: pb.GenerateRequest, index: int) -> _Stream:
        return _Stream(request, index, self.tokenizer)

    def _match(self, request: pb.GenerateRequest) -> CachedByTier:
        ids = list(request.token_ids.ids)
        matched = 0
        for key in self.keys(ids, request.cache_salt):
            if key not in self.pages["l1"] or request.no_cache:
                break
            matched += 1
        return CachedByTier(l1=min(matched * PAGE_SIZE, len(ids) - 1))

    async def _write(self, context: Any, message: Any) -> None:
        while self.silent.is_set():
            await asyncio.sleep(0.01)
        await context.write(message)


class _Stream(SequenceStream):
    """One answer, which starts after the tokens that another double has sent."""

    def __init__(self, request: pb.GenerateRequest, index: int, tokenizer: Any) -> None:
        ids = list(request.token_ids.ids)
        super().__init__(
            index=index,
            prompt_tokens=len(ids),
            detokenizer=Detokenizer(tokenizer, ids, skip_special_tokens=True),
            stops=list(request.sampling.stop),
        )
        greedy = request.sampling.HasField("temperature") and request.sampling.temperature == 0
        self._seed = 0 if greedy else (request.sampling.seed + index) % 2**64
        self._prompt, self._sampling = ids, request.sampling
        self._generated = list(request.resume_token_ids)
        if self._generated:
            self.push(TokenOutput(token_ids=tuple(self._generated)))
            self.take()

    def advance(self, cached: CachedByTier) -> None:
        """Say one more token."""
        if len(self._generated) >= (self._sampling.max_tokens or 40):
            self.push(TokenOutput(finish_reason=FinishReason.LENGTH, cached=cached))
            return
        tokens = [*self._prompt, *self._generated]
        token = next_token(tokens, len(self._generated), self._seed, ends=not self._sampling.ignore_eos)
        self._generated.append(token)
        logprobs = (Logprob(token, -0.01 * len(tokens)),) if self._sampling.logprobs else ()
        end = FinishReason.STOP if token == EOS else None
        self.push(TokenOutput(token_ids=(token,), logprobs=logprobs, finish_reason=end, cached=cached))


@asynccontextmanager
async def doubles(*ids: str, **fields: Any) -> AsyncGenerator[list[Double], None]:
    """Some that serve, until the end of the block."""
    engines = [Double(id, **fields) for id in ids]
    try:
        for engine in engines:
            await engine.start()
        yield engines
    finally:
        for engine in engines:
            await engine.kill()


async def _main(id: str, port: int, delay: float) -> None:
    """A process of its own, to be killed and stopped for real; `delay` is the time that a token takes."""
    engine = Double(id)
    write = engine._write

    async def slow(context: Any, message: Any) -> None:
        if isinstance(message, pb.GenerateChunk):
            await asyncio.sleep(delay)
        await write(context, message)

    engine._write = slow
    print(await engine.start(port), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
