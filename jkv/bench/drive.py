"""Sends requests and times them: one at a time, a closed loop, or open-loop arrivals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from jkv.bench.clients import Chunk, Client, RequestFailedError, TargetInfo, Usage, open_client
from jkv.bench.load import Prompt
from jkv.bench.metrics import Record
from jkv.errors import ConfigError

_DONE = ("length", "stop")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A connected target and its model; `vocab_size` bounds the ids that prompts are drawn from."""

    client: Client
    info: TargetInfo
    vocab_size: int
    timeout_s: float

    def check_fits(self, tokens: int, given: str) -> None:
        """Refuse a sequence of `tokens` that the model cannot hold; `given` are the flags that ask for it."""
        limit = self.info.max_model_len
        if limit is not None and tokens > limit:
            raise ConfigError(f"{given}: makes {tokens} tokens, {self.info.model} holds {limit}")

    async def run(
        self,
        prompt: Prompt,
        output_len: int,
        on_token: Callable[[], None] | None = None,
        *,
        ignore_eos: bool = True,
    ) -> Record:
        """Send one request and time it; a failure is a record with its `error`, never an exception.

        `on_token` is called at each chunk that brings tokens.
        """
        sent_at = time.perf_counter()
        stream = _Stream(prompt_tokens=len(prompt), on_token=on_token)
        error = ""
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                aclosing(
                    self.client.stream(self.info.model, prompt, output_len, ignore_eos=ignore_eos)
                ) as chunks,
            ):
                async for chunk in chunks:
                    stream.add(chunk)
            error = stream.error()
        except RequestFailedError as failure:
            error = str(failure)
        except TimeoutError:
            error = f"not done within --timeout {self.timeout_s:g}"
        return stream.record(sent_at, error)


class _Stream:
    """What has arrived of one response."""

    def __init__(self, *, prompt_tokens: int, on_token: Callable[[], None] | None) -> None:
        self._prompt_tokens = prompt_tokens
        self._on_token = on_token
        self._times: list[float] = []
        self._ids: list[int] = []
        self._ended_at: float | None = None
        self._finish_reason = ""
        self._usage: Usage | None = None

    def add(self, chunk: Chunk) -> None:
        now = time.perf_counter()
        if chunk.tokens:
            self._times.extend([now] * chunk.tokens)
            self._ids.extend(chunk.token_ids)
            if self._on_token is not None:
                self._on_token()
        # The usage may follow in an event of its own; the request ends for its reader at the finish reason.
        if chunk.tokens or chunk.finish_reason:
            self._ended_at = now
        self._finish_reason = chunk.finish_reason or self._finish_reason
        self._usage = chunk.usage or self._usage

    def error(self) -> str:
        if self._finish_reason not in _DONE:
            return f"finish reason {self._finish_reason!r}" if self._finish_reason else "the stream broke off"
        return "" if self._times else "no token arrived"

    def record(self, sent_at: float, error: str) -> Record:
        usage = self._usage
        return Record(
            sent_at=sent_at,
            ended_at=time.perf_counter() if self._ended_at is None or error else self._ended_at,
            token_times=tuple(self._times),
            prompt_tokens=usage.prompt_tokens if usage else self._prompt_tokens,
            output_tokens=usage.completion_tokens if usage else len(self._times),
            output_ids=tuple(self._ids),
            cached_tokens=usage.cached_tokens if usage else None,
            cached_by_tier=usage.cached_by_tier if usage else None,
            error=error,
        )


@asynccontextmanager
async def connected(
    url: str, *, model: str | None, vocab_size: int | None, timeout_s: float
) -> AsyncIterator[Target]:
    """Connect, ask for the model, and close afterwards.

    Raises:
        TargetError: the target does not answer.
        ConfigError: a flag that does not suit the target.
    """
    client = open_client(url)
    try:
        info = await client.describe(model)
        known = info.vocab_size
        if vocab_size is not None and known is not None and vocab_size > known:
            raise ConfigError(f"--vocab-size {vocab_size}: {info.model} has {known} tokens")
        size = vocab_size or known
        if size is None:
            raise ConfigError(
                f"--vocab-size: needed, since {url} does not tell the size of {info.model}'s vocabulary"
            )
        yield Target(client=client, info=info, vocab_size=size, timeout_s=timeout_s)
    finally:
        await client.close()


async def closed_loop(
    target: Target, prompts: Sequence[Prompt], output_len: int, concurrency: int
) -> list[Record]:
    """Keep `concurrency` requests in flight until all prompts are done."""
    waiting = iter(prompts)
    records: list[Record] = []

    async def worker() -> None:
        for prompt in waiting:
            records.append(await target.run(prompt, output_len))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(prompts))):
            group.create_task(worker())
    return records


async def open_loop(
    target: Target, prompts: Sequence[Prompt], output_len: int, arrivals: Sequence[float]
) -> list[Record]:
    """Send each prompt at its arrival time, in seconds from now, however many are still in flight."""
    start = asyncio.get_running_loop().time()

    async def send(prompt: Prompt, at: float) -> Record:
        await asyncio.sleep(start + at - asyncio.get_running_loop().time())
        return await target.run(prompt, output_len)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send(prompt, at)) for prompt, at in zip(prompts, arrivals, strict=True)]
    return [task.result() for task in tasks]
