"""The service over a real socket; the engine behind it is scripted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.api.grpc_server import CACHE_SERVICE, SERVICE, GrpcServer
from jkv.api.prompt import Backend
from jkv.engine.request import EngineRequest, FinishReason, TokenOutput
from jkv.errors import ConfigError, InvalidRequestError, OverloadedError, ShuttingDownError
from jkv.text.chat import ChatTemplate
from tests.api.doubles import EOS, ScriptedCache, ScriptedGenerator, ScriptedReplica, byte_tokenizer

TOKENIZER = byte_tokenizer()
TEMPLATE = ChatTemplate(
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    None,
    None,
)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True)
class Service:
    server: GrpcServer
    port: int
    channel: grpc.aio.Channel
    stub: Any  # the generated stubs have no types
    generator: ScriptedGenerator

    async def chunks(self, request: pb.GenerateRequest, **options: Any) -> list[pb.GenerateChunk]:
        return [chunk async for chunk in self.stub.Generate(request, **options)]

    async def health(self, name: str = "") -> int:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


@asynccontextmanager
async def _service(
    generator: ScriptedGenerator | None = None, *, text: bool = True, ready: bool = True
) -> AsyncIterator[Service]:
    generator = generator or ScriptedGenerator()
    server = GrpcServer()
    port = await server.start("127.0.0.1", 0)
    if ready:
        await server.open(_backend(generator, text=text))
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Service(server, port, channel, pb_grpc.GenerationStub(channel), generator)
    finally:
        await server.stop()


def _backend(generator: ScriptedGenerator, *, text: bool = True) -> Backend:
    return Backend(
        generator=generator,
        cache=ScriptedCache(),
        replica=ScriptedReplica(),
        served_name="bytes",
        tokenizer=TOKENIZER if text else None,
        chat_template=TEMPLATE if text else None,
    )


def run(scenario: Callable[[], Awaitable[None]], limit_s: float = 20.0) -> None:
    async def limited() -> None:
        await asyncio.wait_for(scenario(), limit_s)

    asyncio.run(limited())


async def _refused(answer: Awaitable[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await answer
    return error.value


def _messages(*turns: tuple[str, str]) -> pb.Messages:
    return pb.Messages(messages=[pb.Message(role=role, content=content) for role, content in turns])


def _text(chunks: list[pb.GenerateChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize(
    ("request_", "text", "prompt_tokens"),
    [
        (pb.GenerateRequest(prompt="héllo"), "héllo", 6),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=b"abcdefgh")), "abcdefgh", 8),
        (pb.GenerateRequest(messages=_messages(("user", "hi")), model="bytes"), "[user]hi[assistant]", 19),
    ],
)
def test_generate_streams_text_tokens_and_usage(
    request_: pb.GenerateRequest, text: str, prompt_tokens: int
) -> None:
    async def scenario() -> None:
        async with _service() as service:
            chunks = await service.chunks(request_)
        assert _text(chunks) == text
        assert [token for chunk in chunks for token in chunk.token_ids] == [*text.encode(), EOS]
        assert chunks[-1].finish_reason == "stop"
        usage = chunks[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (prompt_tokens, prompt_tokens + 1)
        assert usage.cached_tokens == usage.cached_by_tier.l1 == prompt_tokens // 8 * 8

    run(scenario)


def test_n_sequences_come_by_index() -> None:
    async def scenario() -> None:
        async with _service() as service:
            chunks = await service.chunks(pb.GenerateRequest(prompt="abc", sampling=pb.Sampling(n=3, seed=5)))
            for index in range(3):
                assert _text([chunk for chunk in chunks if chunk.index == index]) == "abc"
            assert [request.sampling.seed for request in service.generator.requests] == [5, 6, 7]

    run(scenario)


def test_stop_strings_end_the_text_and_the_engine_request() -> None:
    async def scenario() -> None:
        async with _service(ScriptedGenerator(hold=8)) as service:
            request = pb.GenerateRequest(
                prompt="one END two", sampling=pb.Sampling(stop=["END"]), request_id="r"
            )
            chunks = await service.chunks(request)
            assert (_text(chunks), chunks[-1].finish_reason) == ("one ", "stop")
            assert service.generator.closed == ["r"]

    run(scenario)


def test_tokenize_detokenize_and_models() -> None:
    async def scenario() -> None:
        async with _service() as service:
            stub = service.stub
            assert list((await stub.Tokenize(pb.TokenizeRequest(prompt="hi<eos>"))).ids) == [*b"hi", EOS]
            chat = pb.TokenizeRequest(messages=_messages(("user", "x")))
            assert bytes((await stub.Tokenize(chat)).ids) == b"[user]x[assistant]"
            ids = [*"é".encode(), EOS]
            assert (await stub.Detokenize(pb.DetokenizeRequest(ids=ids))).text == "é<eos>"
            skipping = pb.DetokenizeRequest(ids=ids, skip_special_tokens=True)
            assert (await stub.Detokenize(skipping)).text == "é"
            (card,) = (await stub.ListModels(pb.ListModelsRequest())).models
            assert card == pb.ModelCard(
                name="bytes", max_model_len=1024, vocab_size=257, page_size=8, has_tokenizer=True
            )
            error = await _refused(stub.Detokenize(pb.DetokenizeRequest(ids=[1, 257])))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "ids[1]: must be below the vocabulary size 257, got 257" in (error.details() or "")

    run(scenario)


@pytest.mark.parametrize(
    ("request_", "code", "details"),
    [
        (pb.GenerateRequest(), "INVALID_ARGUMENT", "input: one of prompt"),
        (pb.GenerateRequest(prompt=""), "INVALID_ARGUMENT", "prompt: must not be empty"),
        (
            pb.GenerateRequest(token_ids=pb.TokenIds()),
            "INVALID_ARGUMENT",
            "token_ids: must have at least one",
        ),
        (pb.GenerateRequest(messages=_messages()), "INVALID_ARGUMENT", "messages: "),
        (pb.GenerateRequest(messages=_messages(("robot", "x"))), "INVALID_ARGUMENT", "robot"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 257])), "INVALID_ARGUMENT", "token_ids[1]: "),
        (pb.GenerateRequest(prompt="a", model="other"), "NOT_FOUND", "'other' is not served here"),
        (
            pb.GenerateRequest(prompt="a", sampling=pb.Sampling(stop=["x", ""])),
            "INVALID_ARGUMENT",
            "stop[1]: must not be empty",
        ),
        (
            pb.GenerateRequest(prompt="a", sampling=pb.Sampling(temperature=float("nan"))),
            "INVALID_ARGUMENT",
            "temperature: must be a finite number, got nan",
        ),
    ],
)
def test_bad_requests_are_explained_and_never_reach_the_engine(
    request_: pb.GenerateRequest, code: str, details: str
) -> None:
    async def scenario() -> None:
        async with _service() as service:
            error = await _refused(service.chunks(request_))
            assert error.code().name == code
            assert details in (error.details() or "")
            assert service.generator.requests == []

    run(scenario)


def test_a_model_without_a_tokenizer_serves_ids_only() -> None:
    async def scenario() -> None:
        async with _service(text=False) as service:
            chunks = await service.chunks(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2])))
            assert [token for chunk in chunks for token in chunk.token_ids] == [1, 2, EOS]
            assert _text(chunks) == ""
            ids = pb.TokenIds(ids=[1])
            for request in (
                pb.GenerateRequest(prompt="x"),
                pb.GenerateRequest(messages=_messages(("user", "x"))),
                pb.GenerateRequest(token_ids=ids, sampling=pb.Sampling(stop=["x"])),
            ):
                error = await _refused(service.chunks(request))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "no tokenizer" in (error.details() or "")
            for answer in (
                service.stub.Tokenize(pb.TokenizeRequest(prompt="x")),
                service.stub.Detokenize(pb.DetokenizeRequest(ids=[1])),
            ):
                assert "no tokenizer" in ((await _refused(answer)).details() or "")

    run(scenario)


def test_bytes_that_are_not_utf8_are_refused_and_the_server_lives() -> None:
    async def scenario() -> None:
        async with _service() as service:
            for data, details in (
                (b"\x0a\x02\xc3\x28", "prompt: is not valid UTF-8"),
                (b"\x0a\x7fx", "request: is not a valid jkv.v1.GenerateRequest message"),
            ):
                raw = service.channel.unary_stream(f"/{SERVICE}/Generate")(data)
                error = await _refused(raw.read())
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert error.details() == details
            raw = service.channel.unary_unary(f"/{SERVICE}/Tokenize")(b"\x0a\x02\xc3\x28")
            assert (await _refused(raw)).details() == "prompt: is not valid UTF-8"
            assert _text(await service.chunks(pb.GenerateRequest(prompt="ok"))) == "ok"

    run(scenario)


def test_a_prompt_of_10_mb_is_counted_while_others_are_served() -> None:
    async def scenario() -> None:
        async with _service() as service:
            huge = asyncio.create_task(_refused(service.chunks(pb.GenerateRequest(prompt="a " * 5_000_000))))
            served, longest = 0, 0.0
            while not huge.done():
                started = time.monotonic()
                assert (
                    _text(await service.chunks(pb.GenerateRequest(token_ids=pb.TokenIds(ids=b"hi")))) == "hi"
                )
                longest = max(longest, time.monotonic() - started)
                served += 1
            error = await huge
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.details() == (
                "prompt: has 10000000 tokens; at most 1023 leave room for a completion "
                "(the maximum model length is 1024)"
            )
            assert served > 1
            assert longest < 5.0

    run(scenario, 60.0)


def test_a_client_that_leaves_cancels_the_engine_request() -> None:
    async def scenario() -> None:
        async with _service(ScriptedGenerator(hold=2)) as service:
            call = service.stub.Generate(pb.GenerateRequest(prompt="abc", sampling=pb.Sampling(n=2)))
            assert (await call.read()).token_ids
            call.cancel()
            while len(service.generator.closed) < 2:
                service.generator.any_closed.clear()
                await service.generator.any_closed.wait()
            assert len(service.generator.requests) == 2

    run(scenario)


def test_a_client_that_stops_reading_and_leaves_cancels_too() -> None:
    """The handler is then blocked in a write, not waiting for the engine."""

    def endless(request: EngineRequest) -> list[TokenOutput]:
        return [TokenOutput(token_ids=tuple(b"x" * 500))] * 10_000

    async def scenario() -> None:
        async with _service(ScriptedGenerator(endless)) as service:
            call = service.stub.Generate(pb.GenerateRequest(prompt="abc"))
            assert (await call.read()).token_ids
            await asyncio.sleep(0.2)
            call.cancel()
            await service.generator.any_closed.wait()

    run(scenario)


def test_the_deadline_reaches_the_engine_and_ends_the_call() -> None:
    async def scenario() -> None:
        async with _service(ScriptedGenerator(hold=1)) as service:
            before = time.monotonic()
            error = await _refused(service.chunks(pb.GenerateRequest(prompt="abc"), timeout=0.5))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await service.generator.any_closed.wait()
            (request,) = service.generator.requests
            assert request.deadline is not None
            assert before < request.deadline < before + 1.0
            service.generator.hold = None
            await service.chunks(pb.GenerateRequest(prompt="abc"))
            assert service.generator.requests[-1].deadline is None

    run(scenario)


@pytest.mark.parametrize(
    ("failure", "code", "details"),
    [
        (InvalidRequestError("max_tokens", "too many"), "INVALID_ARGUMENT", "max_tokens: too many"),
        (ShuttingDownError("draining"), "UNAVAILABLE", "draining"),
        (OverloadedError("the queue is full", 1.2345), "RESOURCE_EXHAUSTED", "the queue is full"),
    ],
)
def test_engine_refusals_become_statuses(failure: Exception, code: str, details: str) -> None:
    async def scenario() -> None:
        async with _service() as service:
            service.generator.failure = failure
            error = await _refused(service.chunks(pb.GenerateRequest(prompt="a")))
            assert (error.code().name, error.details()) == (code, details)
            metadata = dict(error.trailing_metadata() or ())
            waits = [metadata.get("retry-after-ms"), metadata.get("grpc-retry-pushback-ms")]
            assert waits == (["1235"] * 2 if isinstance(failure, OverloadedError) else [None] * 2)

    run(scenario)


def test_an_unexpected_exception_is_logged_and_the_server_lives(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with _service() as service:
            service.generator.failure = ZeroDivisionError("secret")
            error = await _refused(service.chunks(pb.GenerateRequest(prompt="a", request_id="r-7")))
            assert error.code() is grpc.StatusCode.INTERNAL
            assert error.details() == "unexpected ZeroDivisionError; the server's log has the traceback"
            service.generator.failure = None
            assert _text(await service.chunks(pb.GenerateRequest(prompt="ok"))) == "ok"

    with caplog.at_level(logging.ERROR):
        run(scenario)
    (record,) = [record for record in caplog.records if "r-7" in record.getMessage()]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


def test_an_engine_error_ends_the_stream_with_its_reason() -> None:
    async def scenario() -> None:
        ends = [
            TokenOutput(token_ids=(65,)),
            TokenOutput(finish_reason=FinishReason.ERROR, error="out of pages"),
        ]
        chunks: list[pb.GenerateChunk] = []

        async with _service(ScriptedGenerator(lambda _: ends)) as service:

            async def read() -> None:
                async for chunk in service.stub.Generate(pb.GenerateRequest(prompt="a")):
                    chunks.append(chunk)

            error = await _refused(read())
        assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "out of pages")
        assert _text(chunks) == "A"
        assert chunks[-1].finish_reason == "error"

    run(scenario)


def test_a_live_request_id_cannot_be_used_twice() -> None:
    async def scenario() -> None:
        async with _service(ScriptedGenerator(hold=1)) as service:
            request = pb.GenerateRequest(prompt="abc", request_id="r")
            first = aiter(service.stub.Generate(request))
            await anext(first)
            error = await _refused(service.chunks(request))
            assert (error.code().name, error.details()) == (
                "INVALID_ARGUMENT",
                "request_id: 'r' is running already",
            )
            service.generator.release.set()
            assert _text([chunk async for chunk in first]) == "bc"
            assert _text(await service.chunks(request)) == "abc"

    run(scenario)


def test_health_and_service_follow_the_model() -> None:
    names = ("", SERVICE, CACHE_SERVICE)

    async def scenario() -> None:
        async with _service(ScriptedGenerator(hold=1), ready=False) as service:
            assert [await service.health(name) for name in names] == [NOT_SERVING] * 3
            error = await _refused(service.chunks(pb.GenerateRequest(prompt="a")))
            assert (error.code().name, error.details()) == ("UNAVAILABLE", "the model is still loading")

            await service.server.open(_backend(service.generator))
            assert [await service.health(name) for name in names] == [SERVING] * 3
            running = aiter(service.stub.Generate(pb.GenerateRequest(prompt="abc")))
            await anext(running)

            await service.server.close()
            assert [await service.health(name) for name in names] == [NOT_SERVING] * 3
            error = await _refused(service.chunks(pb.GenerateRequest(prompt="a")))
            assert (error.code().name, error.details()) == ("UNAVAILABLE", "the server is shutting down")
            service.generator.release.set()
            assert _text([chunk async for chunk in running]) == "bc"

    run(scenario)


def test_stop_waits_for_streams_that_are_being_delivered() -> None:
    async def scenario() -> None:
        async with _service(ScriptedGenerator(hold=1)) as service:
            call = service.stub.Generate(pb.GenerateRequest(prompt="abc"))
            running = aiter(call)
            await anext(running)
            stopping = asyncio.create_task(service.server.stop())
            await asyncio.sleep(0.05)
            assert not stopping.done()
            service.generator.release.set()
            assert _text([chunk async for chunk in running]) == "bc"
            assert await call.code() is grpc.StatusCode.OK
            await stopping

    run(scenario)


def test_reflection_describes_the_service() -> None:
    async def scenario() -> None:
        async with _service() as service:
            channel: Any = service.channel
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            names = {item.name for item in (await call.read()).list_services_response.service}
            assert names == {
                SERVICE,
                CACHE_SERVICE,
                "jkv.v1.Replica",
                "grpc.health.v1.Health",
                "grpc.reflection.v1alpha.ServerReflection",
            }
            for name in (SERVICE, CACHE_SERVICE):
                await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
                assert (await call.read()).file_descriptor_response.file_descriptor_proto
            await call.done_writing()

    run(scenario)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1", ["--grpc-port", "Address already in use"]),
        ("no.such.host.invalid", ["--host no.such.host"]),
    ],
)
def test_an_address_that_cannot_be_bound_names_the_flag(host: str, words: list[str]) -> None:
    async def scenario() -> None:
        async with _service() as service:
            with pytest.raises(ConfigError) as error:
                await GrpcServer().start(host, service.port)
            for word in words:
                assert word in str(error.value)

    run(scenario)
