"""What the API tests put at its borders: a scripted Generator and cache, and a byte-level tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jkv.cache.control import CacheStats, Prefix, TierStats
from jkv.cache.pages import Tier
from jkv.cache.replica import Digest, ReplicaDescription, ReplicaEvent, TierDigest
from jkv.engine.request import CachedByTier, EngineInfo, EngineRequest, FinishReason, Sink, TokenOutput
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

    async def generate(self, request: EngineRequest, sink: Sink) -> None:
        self.requests.append(request)
        try:
            if self.failure is not None:
                raise self.failure
            for position, output in enumerate(self.script(request)):
                if position == self.hold:
                    await self.release.wait()
                if sink(output):
                    return
                await asyncio.sleep(0)
        finally:
            self.closed.append(request.request_id)
            self.any_closed.set()


STATS = CacheStats(
    tiers={
        Tier.L3: TierStats(
            pages=30,
            pages_capacity=300,
            bytes=30 * 2**20,
            bytes_capacity=300 * 2**20,
            pinned_pages=3,
            hits=31,
            misses=32,
            hit_tokens=248,
            evictions=33,
            loads=34,
            stores=35,
            drops=36,
            quarantined=1,
            errors={"checksum": 1, "timeout": 2},
            read_bytes_per_s=1.5 * 2**30,
            write_bytes_per_s=0.0,
            breaker="half-open",
        ),
        Tier.L1: TierStats(pages=10, pages_capacity=100, hits=11, hit_tokens=88),
    },
    prefill_tokens_per_s=812.5,
    pending_writes=4,
    gated_loads=5,
    late_loads=6,
)


class ScriptedReplica:
    """A `Replica` with two pages in L1 and the events and digest that a test gives it."""

    incarnation = "first"
    kv_dtype = "float32"
    store = None

    def __init__(self) -> None:
        self.description = ReplicaDescription(
            id="engine", model="bytes", model_root=b"r" * 16, page_size=8, page_bytes=64, tiers=(Tier.L1,)
        )
        self.events: list[ReplicaEvent] = []
        self.pages: list[bytes] = []
        self.asked: list[Any] = []

    def use_peers(self, client: Any, trusts: Any) -> None:
        self.asked.append((client, trusts))

    def follow_own(self, add: Any, remove: Any) -> None:
        self.asked.append((add, remove))

    async def watch(self, incarnation: str, after: int) -> AsyncGenerator[ReplicaEvent, None]:
        self.asked.append((incarnation, after))
        for event in self.events:
            yield event

    async def fetch(self, model_root: bytes, keys: Sequence[bytes]) -> AsyncGenerator[bytes, None]:
        self.asked.append((model_root, list(keys)))
        for page in self.pages:
            yield page

    async def digest(self) -> Digest:
        return Digest(
            incarnation=self.incarnation, number=7, tiers={Tier.L1: TierDigest(pages=2, checksum=5)}
        )


class ScriptedCache:
    """A `CacheControl` that notes each call and gives a fixed answer, or raises `failure`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failure: Exception | None = None
        self.release = asyncio.Event()  # what drain waits for
        self.release.set()

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if self.failure is not None:
            raise self.failure

    async def cache_stats(self) -> CacheStats:
        self._note("cache_stats")
        return STATS

    async def lookup(self, prefix: Prefix) -> Mapping[Tier, int]:
        self._note("lookup", prefix)
        return {Tier.L1: 8, Tier.L3: 16}

    async def pin(self, prefix: Prefix, ttl_s: float | None) -> int:
        self._note("pin", prefix, ttl_s)
        return 3

    async def unpin(self, prefix: Prefix) -> int:
        self._note("unpin", prefix)
        return 2

    async def prefetch(self, prefix: Prefix, tier: Tier) -> int:
        self._note("prefetch", prefix, tier)
        return 24

    async def demote(self, tier: Tier) -> int:
        self._note("demote", tier)
        return 7

    async def flush(self, tiers: Sequence[Tier]) -> Mapping[Tier, int]:
        self._note("flush", tuple(tiers))
        return {tier: 10 * (position + 1) for position, tier in enumerate(tiers)}

    async def drain_writes(self) -> None:
        self._note("drain_writes")
        await self.release.wait()

    async def evict(self, prefix: Prefix | None, cache_salt: str | None) -> int:
        self._note("evict", prefix, cache_salt)
        return 5
