"""From the engine's tokens to the API's chunks: text, stop strings, usage, and the merging of sequences."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence

from jkv.api import jkv_pb2 as pb
from jkv.api.status import GenerationError
from jkv.engine.request import CachedByTier, EngineRequest, FinishReason, Generator, Logprob, TokenOutput
from jkv.text.detokenize import Detokenizer
from jkv.text.stop import StopStrings

# With 20 alternatives a token this is about 140 KB, well below the 4 MB that gRPC clients accept.
MAX_CHUNK_TOKENS = 512


class SequenceStream:
    """One sequence's chunks. Tokens that nobody has taken yet gather in few chunks, however slow the reader.

    Without a detokenizer (a model without a tokenizer) the text stays empty.
    """

    def __init__(
        self,
        *,
        index: int,
        prompt_tokens: int,
        detokenizer: Detokenizer | None = None,
        stops: Sequence[str] = (),
    ) -> None:
        self._index = index
        self._prompt_tokens = prompt_tokens
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._chunks: list[pb.GenerateChunk] = []
        self._completion_tokens = 0
        self._cached = CachedByTier()
        self._begun = False
        self.finish_reason: FinishReason | None = None
        self.error = ""

    def push(self, output: TokenOutput) -> None:
        """Add an engine output; once `finish_reason` is set the sequence takes no more.

        A stop string ends the sequence at the token that completed it, and the text before the string. The
        token that ended the sequence in the engine has no text.
        """
        assert self.finish_reason is None, "the sequence has ended"
        self._cached = output.cached
        ended_by_token = output.finish_reason is FinishReason.STOP
        for position, token in enumerate(output.token_ids):
            chunk = self._open_chunk()
            chunk.token_ids.append(token)
            self._completion_tokens += 1
            if output.logprobs:
                chunk.logprobs.append(_logprob(output.logprobs[position]))
            is_end_token = ended_by_token and position == len(output.token_ids) - 1
            if self._detokenizer is not None and not is_end_token:
                emit, stopped = self._stops.push(self._detokenizer.push(token))
                if emit:
                    chunk.text += emit
                if stopped:
                    self._finish(FinishReason.STOP)
                    return
        if output.finish_reason is not None:
            self.error = output.error
            self._finish(FinishReason.STOP if self._flush() else output.finish_reason)

    def resume(self, request: EngineRequest, eos: Collection[int]) -> None:
        """Takes the tokens that another server has given out already, with their text; ends the sequence
        where they complete it.
        """
        sampling, last = request.sampling, len(request.resumed) - 1
        for position, token in enumerate(request.resumed):
            self._completion_tokens += 1
            ends = token in sampling.stop_token_ids or (token in eos and not sampling.ignore_eos)
            stopped = False
            if self._detokenizer is not None and not ends:
                _, stopped = self._stops.push(self._detokenizer.push(token))
            if stopped:
                self._finish(FinishReason.STOP)
                return
            if ends or (position == last and self._completion_tokens >= sampling.max_tokens):
                reason = FinishReason.STOP if ends else FinishReason.LENGTH
                self._finish(FinishReason.STOP if self._flush() else reason)
                return

    def take(self) -> list[pb.GenerateChunk]:
        """The chunks gathered since the last call."""
        chunks, self._chunks = self._chunks, []
        return chunks

    def _open_chunk(self) -> pb.GenerateChunk:
        if not self._chunks or len(self._chunks[-1].token_ids) >= MAX_CHUNK_TOKENS:
            self._chunks.append(pb.GenerateChunk(index=self._index))
            if not self._begun:
                self._begun = True
                self._chunks[-1].cached_by_tier.CopyFrom(_by_tier(self._cached))
        return self._chunks[-1]

    def _flush(self) -> bool:
        """Give out the text held back; True if it completes a stop string after all."""
        if self._detokenizer is None:
            return False
        emit, stopped = self._stops.push(self._detokenizer.flush())
        rest = "" if stopped else self._stops.flush()
        if emit or rest:
            self._last_chunk().text += emit + rest
        return stopped

    def _last_chunk(self) -> pb.GenerateChunk:
        """The chunk that text and the end may join, however many tokens it has."""
        return self._chunks[-1] if self._chunks else self._open_chunk()

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        chunk, cached = self._last_chunk(), self._cached
        chunk.finish_reason = reason.value
        chunk.usage.CopyFrom(
            pb.Usage(
                prompt_tokens=self._prompt_tokens,
                completion_tokens=self._completion_tokens,
                cached_tokens=cached.total,
                cached_by_tier=_by_tier(cached),
            )
        )


def _by_tier(cached: CachedByTier) -> pb.CachedByTier:
    return pb.CachedByTier(l1=cached.l1, l2=cached.l2, l3=cached.l3, peer=cached.peer)


def _logprob(entry: Logprob) -> pb.TokenLogprob:
    top = [pb.TokenLogprob(id=token, logprob=logprob) for token, logprob in entry.top]
    return pb.TokenLogprob(id=entry.token_id, logprob=entry.logprob, top=top)


async def merge(
    generator: Generator, sequences: Sequence[tuple[EngineRequest, SequenceStream]]
) -> AsyncGenerator[pb.GenerateChunk, None]:
    """Run the sequences side by side and yield their chunks as they come.

    Closing this iterator, or an error of any sequence, closes all of them in the engine; a stop string closes
    its own sequence. Raises what `Generator.generate` raises, after the chunks that came before.
    """
    news = asyncio.Event()
    tasks = [asyncio.create_task(_pump(generator, request, stream, news)) for request, stream in sequences]
    try:
        while True:
            await news.wait()
            news.clear()
            running = [task for task in tasks if not task.done()]
            for _, stream in sequences:
                for chunk in stream.take():
                    yield chunk
            for task in tasks:
                if task.done():
                    task.result()
            if not running:
                return
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    generator: Generator, request: EngineRequest, stream: SequenceStream, news: asyncio.Event
) -> None:
    def sink(output: TokenOutput) -> bool:
        stream.push(output)
        news.set()
        return stream.finish_reason is not None

    try:
        await generator.generate(request, sink)
        if stream.finish_reason is None:
            raise GenerationError(f"the engine ended {request.request_id} without a finish reason")
    finally:
        news.set()
