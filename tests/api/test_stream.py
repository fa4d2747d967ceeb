from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.api import jkv_pb2 as pb
from jkv.api.status import GenerationError
from jkv.api.stream import MAX_CHUNK_TOKENS, SequenceStream, merge
from jkv.engine.request import (
    CachedByTier,
    EngineRequest,
    FinishReason,
    Logprob,
    SamplingParams,
    TokenOutput,
)
from jkv.errors import OverloadedError
from jkv.text.detokenize import Detokenizer
from tests.api.doubles import EOS, ScriptedGenerator, byte_tokenizer, echo

TOKENIZER = byte_tokenizer()


def _stream(stops: Sequence[str] = (), *, index: int = 0, text: bool = True) -> SequenceStream:
    detokenizer = Detokenizer(TOKENIZER, (97,), skip_special_tokens=True) if text else None
    return SequenceStream(index=index, prompt_tokens=7, detokenizer=detokenizer, stops=stops)


def _output(text: str | bytes, reason: FinishReason | None = None) -> TokenOutput:
    data = text.encode() if isinstance(text, str) else text
    end = (EOS,) if reason is FinishReason.STOP else ()
    return TokenOutput(token_ids=(*data, *end), finish_reason=reason, cached=CachedByTier(l1=2, l3=3))


def _play(stream: SequenceStream, outputs: Sequence[TokenOutput]) -> list[pb.GenerateChunk]:
    """Chunks as a reader sees them that keeps up with the engine."""
    chunks: list[pb.GenerateChunk] = []
    for output in outputs:
        stream.push(output)
        chunks += stream.take()
        if stream.finish_reason is not None:
            break
    return chunks


def _text(chunks: Sequence[pb.GenerateChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def _ids(chunks: Sequence[pb.GenerateChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def test_tokens_become_text_and_the_last_chunk_has_the_usage() -> None:
    chunks = _play(_stream(index=3), [_output("he"), _output("llo", FinishReason.STOP)])
    assert [chunk.text for chunk in chunks] == ["he", "llo"]
    assert _ids(chunks) == [*b"hello", EOS]
    assert {chunk.index for chunk in chunks} == {3}
    assert [chunk.finish_reason for chunk in chunks] == ["", "stop"]
    assert not chunks[0].HasField("usage")
    usage = chunks[1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (7, 6, 5)
    assert usage.cached_by_tier == pb.CachedByTier(l1=2, l3=3)


def test_an_end_token_that_is_ordinary_text_is_left_out() -> None:
    stream = _stream()
    stream.push(TokenOutput(token_ids=tuple(b"hi!"), finish_reason=FinishReason.STOP))
    (chunk,) = stream.take()
    assert (chunk.text, list(chunk.token_ids)) == ("hi", list(b"hi!"))


def test_the_last_token_at_the_length_limit_keeps_its_text() -> None:
    chunks = _play(_stream(), [_output("hi!", FinishReason.LENGTH)])
    assert (_text(chunks), chunks[-1].finish_reason) == ("hi!", "length")


def test_a_finish_without_tokens_is_a_chunk_of_its_own() -> None:
    chunks = _play(_stream(), [_output("hi"), _output("", FinishReason.CANCELLED)])
    assert [(chunk.text, chunk.finish_reason) for chunk in chunks] == [("hi", ""), ("", "cancelled")]
    assert chunks[-1].usage.completion_tokens == 2


def test_half_a_character_waits_for_its_other_half() -> None:
    chunks = _play(_stream(), [_output(b"a\xc3"), _output(b"\xa9", FinishReason.LENGTH)])
    assert [chunk.text for chunk in chunks] == ["a", "é"]
    chunks = _play(_stream(), [_output(b"a\xc3", FinishReason.LENGTH)])
    assert _text(chunks) == "a\N{REPLACEMENT CHARACTER}"


def test_a_stop_string_ends_text_before_it_and_tokens_with_it() -> None:
    chunks = _play(_stream(["END", "xyz"]), [_output("one E"), _output("ND two"), _output("three")])
    assert _text(chunks) == "one "
    assert _ids(chunks) == list(b"one END")
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 7


def test_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    chunks = _play(_stream(["END"]), [_output("one EN"), _output("", FinishReason.LENGTH)])
    assert [chunk.text for chunk in chunks] == ["one ", "EN"]


def test_a_stop_string_completed_by_the_flush_counts() -> None:
    stream = _stream(["\N{REPLACEMENT CHARACTER}"])
    chunks = _play(stream, [_output(b"ab\xc3", FinishReason.LENGTH)])
    assert (_text(chunks), chunks[-1].finish_reason) == ("ab", "stop")


def test_logprobs_stay_beside_their_tokens() -> None:
    stream = _stream(["b"])
    entries = tuple(Logprob(token, -0.5, ((token, -0.5), (1, -2.0))) for token in b"abc")
    stream.push(TokenOutput(token_ids=tuple(b"abc"), logprobs=entries))
    (chunk,) = stream.take()
    assert [entry.id for entry in chunk.logprobs] == list(b"ab")
    assert [(top.id, top.logprob) for top in chunk.logprobs[0].top] == [(97, -0.5), (1, -2.0)]


def test_without_a_tokenizer_there_is_no_text() -> None:
    chunks = _play(_stream(text=False), [_output("hi"), _output("", FinishReason.STOP)])
    assert (_text(chunks), _ids(chunks)) == ("", [*b"hi", EOS])


def test_tokens_nobody_takes_gather_in_few_chunks() -> None:
    stream = _stream()
    for _ in range(2 * MAX_CHUNK_TOKENS):
        stream.push(_output("a"))
    stream.push(_output("b", FinishReason.LENGTH))
    chunks = stream.take()
    assert [len(chunk.token_ids) for chunk in chunks] == [MAX_CHUNK_TOKENS, MAX_CHUNK_TOKENS, 1]
    assert _text(chunks) == "a" * 2 * MAX_CHUNK_TOKENS + "b"
    assert stream.take() == []


_ALPHABET = st.text(alphabet="abé😀", max_size=30)


@given(
    text=_ALPHABET,
    stops=st.lists(st.text(alphabet="abé😀", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    slow=st.booleans(),
)
def test_stops_end_the_text_the_same_however_tokens_arrive(
    text: str, stops: list[str], cuts: list[int], slow: bool
) -> None:
    data = text.encode()
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[start:end] for start, end in itertools.pairwise(edges)]
    outputs = [*(_output(piece) for piece in pieces), _output("", FinishReason.STOP)]
    stream = _stream(stops)
    if slow:
        for output in outputs:
            stream.push(output)
            if stream.finish_reason is not None:
                break
        chunks = stream.take()
    else:
        chunks = _play(stream, outputs)

    # The first stop string to be completed ends the text; the longest of those completed together.
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if ends:
        matched = max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
        assert _text(chunks) == text[: ends[0] - matched]
        assert _ids(chunks) == list(text[: ends[0]].encode())
    else:
        assert _text(chunks) == text
        assert _ids(chunks) == [*data, EOS]
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == len(_ids(chunks))
    assert sum(chunk.HasField("usage") for chunk in chunks) == 1


def _request(name: str, text: str) -> EngineRequest:
    return EngineRequest(
        request_id=name, prompt_ids=tuple(text.encode()), sampling=SamplingParams(max_tokens=100)
    )


async def _collect(
    generator: ScriptedGenerator, pairs: Sequence[tuple[EngineRequest, SequenceStream]]
) -> list[pb.GenerateChunk]:
    return [chunk async for chunk in merge(generator, pairs)]


def test_sequences_merge_and_each_ends_once() -> None:
    async def scenario() -> None:
        generator = ScriptedGenerator()
        pairs = [(_request(f"r-{i}", "ab" * (i + 1)), _stream(index=i)) for i in range(3)]
        chunks = await _collect(generator, pairs)
        for index in range(3):
            own = [chunk for chunk in chunks if chunk.index == index]
            assert _text(own) == "ab" * (index + 1)
            assert [chunk.finish_reason for chunk in own if chunk.finish_reason] == ["stop"]
            assert own[-1].finish_reason == "stop"
        assert sorted(generator.closed) == ["r-0", "r-1", "r-2"]

    asyncio.run(scenario())


def test_a_stop_string_closes_the_engine_request() -> None:
    async def scenario() -> None:
        generator = ScriptedGenerator(hold=4)
        chunks = await _collect(generator, [(_request("r", "one two three"), _stream([" "]))])
        assert _text(chunks) == "one"
        assert generator.closed == ["r"]

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_closing_the_merge_closes_every_sequence() -> None:
    async def scenario() -> None:
        generator = ScriptedGenerator(hold=1)
        pairs = [(_request(f"r-{i}", "abc"), _stream(index=i)) for i in range(3)]
        async with aclosing(merge(generator, pairs)) as chunks:
            await anext(chunks)
        assert sorted(generator.closed) == ["r-0", "r-1", "r-2"]

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_an_error_of_one_sequence_ends_all_after_the_chunks_before_it() -> None:
    async def scenario() -> None:
        def script(request: EngineRequest) -> list[TokenOutput]:
            if request.request_id == "r-1":
                raise OverloadedError("full", 1.0)
            return echo(request)

        generator = ScriptedGenerator(script, hold=1)
        pairs = [(_request(f"r-{i}", "abc"), _stream(index=i)) for i in range(2)]
        chunks: list[pb.GenerateChunk] = []

        async def read() -> None:
            async for chunk in merge(generator, pairs):
                chunks.append(chunk)

        with pytest.raises(OverloadedError):
            await read()
        assert _text(chunks) == "a"
        assert sorted(generator.closed) == ["r-0", "r-1"]

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_an_engine_that_stops_without_a_reason_is_an_error() -> None:
    async def scenario() -> None:
        generator = ScriptedGenerator(lambda _: [_output("a")])
        with pytest.raises(GenerationError, match="r without a finish reason"):
            await _collect(generator, [(_request("r", "a"), _stream())])

    asyncio.run(scenario())


def test_a_slow_reader_gets_coalesced_chunks() -> None:
    async def scenario() -> None:
        generator = ScriptedGenerator()
        chunks = []
        async for chunk in merge(generator, [(_request("r", "x" * 90), _stream())]):
            chunks.append(chunk)
            for _ in range(40):
                await asyncio.sleep(0)
        assert _text(chunks) == "x" * 90
        assert len(chunks) < 15

    asyncio.run(scenario())


@given(
    text=st.text("ab\u00e9\u20ac\U0001f600", max_size=12),
    stops=st.lists(st.text("ab\u00e9", min_size=1, max_size=3), max_size=2),
    data=st.data(),
)
def test_an_answer_that_another_server_goes_on_with_reads_as_one(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    outputs = [_output(bytes([byte])) for byte in text.encode()]
    outputs.append(TokenOutput(token_ids=(EOS,), finish_reason=FinishReason.STOP))
    whole = _play(_stream(stops), outputs)
    sent_tokens = _ids(whole)
    cut = data.draw(st.integers(0, len(sent_tokens)))
    first = [c for number, c in enumerate(whole) if len(_ids(whole[: number + 1])) <= cut]
    second, resumed = _stream(stops), tuple(sent_tokens[:cut])
    second.resume(_resumed_request(resumed), {EOS})
    chunks = second.take()
    if second.finish_reason is None:
        chunks += _play(second, outputs[cut:])
    assert _text(first) + _text(chunks) == _text(whole) or cut == len(sent_tokens)
    assert [*resumed, *_ids(chunks)] == sent_tokens
    assert chunks[-1].finish_reason == whole[-1].finish_reason
    assert chunks[-1].usage.completion_tokens == whole[-1].usage.completion_tokens


def _resumed_request(resumed: tuple[int, ...], max_tokens: int = 100) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    return EngineRequest(request_id="r", prompt_ids=(97,), sampling=sampling, resumed=resumed)


def test_an_answer_that_is_complete_already_only_ends() -> None:
    stream = _stream()
    stream.resume(_resumed_request(tuple(b"abc"), max_tokens=3), {EOS})
    (chunk,) = stream.take()
    assert (chunk.text, chunk.finish_reason, chunk.usage.completion_tokens) == ("", "length", 3)


def test_the_first_chunk_tells_what_was_cached() -> None:
    chunks = _play(_stream(), [_output("a"), _output("b"), _output("c", FinishReason.STOP)])
    assert (chunks[0].cached_by_tier.l1, chunks[0].cached_by_tier.l3) == (2, 3)
    assert not any(chunk.HasField("cached_by_tier") for chunk in chunks[1:])
