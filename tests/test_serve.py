"""The life of a server process: real signals, a real port, a scripted engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.engine.gpu_memory import MEMORY_FRACTION
from jkv.serve import main

# argv[1] is how long loading takes, argv[2] the seconds between tokens; the rest are flags.
_PROCESS = """
import asyncio, sys, time
from types import SimpleNamespace
from jkv import serve
from jkv.config import parse_config
from jkv.engine.request import CachedByTier, FinishReason, TokenOutput
from jkv.errors import UnsupportedModelError
from tests.api.doubles import INFO, ScriptedCache, ScriptedReplica, byte_tokenizer

loading, pace = float(sys.argv[1]), float(sys.argv[2])

class Engine:
    info = INFO
    def __init__(self):
        self.running, self.cancelled = 0, asyncio.Event()
        self.cache = ScriptedCache()
        self.replica = ScriptedReplica()
    async def ended(self):
        await asyncio.Event().wait()

    async def drain(self, timeout):
        print("drains", timeout, flush=True)
        end = time.monotonic() + timeout
        while self.running and time.monotonic() < end:
            await asyncio.sleep(0.01)
        self.cancelled.set()
        print("drained", flush=True)
    async def generate(self, request, sink):
        self.running += 1
        try:
            for token in request.prompt_ids:
                if self.cancelled.is_set():
                    sink(TokenOutput(finish_reason=FinishReason.CANCELLED))
                    return
                sink(TokenOutput(token_ids=(token,)))
                await asyncio.sleep(pace)
            sink(TokenOutput(finish_reason=FinishReason.LENGTH))
        finally:
            self.running -= 1

def build(config, progress):
    time.sleep(loading)
    if config.model == "broken":
        raise UnsupportedModelError("model broken: no such architecture")
    return SimpleNamespace(
        engine=Engine(), tokenizer=byte_tokenizer(), chat_template=None, served_name=config.model
    )

config = parse_config(sys.argv[3:])
asyncio.run(serve.serve(config, build))
"""


class Process:
    """A server in a process of its own; `address` is where its first line says it listens."""

    def __init__(self, *flags: str, loading: float = 0.0, pace: float = 0.0) -> None:
        command = [sys.executable, "-c", _PROCESS, str(loading), str(pace), "--grpc-port", "0", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.address = self.line().split()[2].rstrip(",")

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip()

    def health(self) -> int:
        with grpc.insecure_channel(self.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            return stub.Check(health_pb2.HealthCheckRequest()).status


@contextmanager
def _running(*flags: str, loading: float = 0.0, pace: float = 0.0) -> Iterator[Process]:
    server = Process(*flags, loading=loading, pace=pace)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def _texts(call: Any) -> str:
    return "".join(chunk.text for chunk in call)


def test_it_listens_while_loading_then_serves_and_exits_cleanly() -> None:
    with _running("--model", "m", loading=0.5) as server:
        assert server.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        with grpc.insecure_channel(server.address) as channel:
            stub: Any = pb_grpc.GenerationStub(channel)
            with pytest.raises(grpc.RpcError) as error:
                _texts(stub.Generate(pb.GenerateRequest(prompt="hi")))
            failure: Any = error.value
            assert (failure.code(), failure.details()) == (
                grpc.StatusCode.UNAVAILABLE,
                "the model is still loading",
            )
            assert server.line() == f"ready: m on {server.address}"
            assert server.health() == health_pb2.HealthCheckResponse.SERVING
            assert _texts(stub.Generate(pb.GenerateRequest(prompt="hi"))) == "hi"
        server.process.send_signal(signal.SIGINT)
        assert [server.line(), server.line()] == ["drains 30.0", "drained"]
        assert server.process.wait(10) == 0


def test_sigterm_lets_running_requests_finish() -> None:
    with _running(pace=0.1) as server, grpc.insecure_channel(server.address) as channel:
        server.line()
        stub: Any = pb_grpc.GenerationStub(channel)
        call = stub.Generate(pb.GenerateRequest(prompt="abcdefgh"))
        assert next(call).text == "a"
        server.process.send_signal(signal.SIGTERM)
        assert server.line() == "drains 30.0"
        assert server.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError, match="the server is shutting down"):
            _texts(stub.Generate(pb.GenerateRequest(prompt="late")))
        assert _texts(call) == "bcdefgh"
        assert server.process.wait(10) == 0


def test_requests_that_outlast_the_drain_timeout_are_cancelled() -> None:
    with (
        _running("--drain-timeout", "0.3", pace=0.1) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        server.line()
        stub: Any = pb_grpc.GenerationStub(channel)
        call = stub.Generate(pb.GenerateRequest(prompt="x" * 1000))
        next(call)
        server.process.send_signal(signal.SIGTERM)
        *_, last = call
        assert last.finish_reason == "cancelled"
        assert server.process.wait(10) == 0


def test_a_second_signal_exits_at_once() -> None:
    with _running(pace=1.0) as server, grpc.insecure_channel(server.address) as channel:
        server.line()
        stub: Any = pb_grpc.GenerationStub(channel)
        next(stub.Generate(pb.GenerateRequest(prompt="x" * 100)))
        server.process.send_signal(signal.SIGTERM)
        assert server.line() == "drains 30.0"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 128 + signal.SIGTERM


def test_a_signal_while_loading_ends_the_process() -> None:
    with _running(loading=60.0) as server:
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert time.monotonic() - started < 5


def test_a_model_that_cannot_be_loaded_ends_the_process_with_its_error() -> None:
    with _running("--model", "broken") as server:
        assert server.process.wait(10) != 0
        assert server.process.stderr is not None
        assert "model broken: no such architecture" in server.process.stderr.read()


def test_unusable_flags_are_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--page-size", "7"]) == 2
    assert capsys.readouterr().err == "error: --page-size 7: must be a power of two from 8 to 256\n"


_BEFORE_JAX = """
import os, sys
from jkv.serve import main

class Jax:
    def find_spec(self, name, path, target=None):
        if name == "jax":
            told = "XLA_CLIENT_MEM_FRACTION", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
            sys.exit(" ".join(os.environ[name] for name in told))

sys.meta_path.insert(0, Jax())
main([])
"""


def test_what_jax_may_take_of_a_gpu_is_said_before_it_is_imported() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _BEFORE_JAX],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XLA_CLIENT_MEM_FRACTION": "", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "7"},
    )
    assert run.stderr == f"{MEMORY_FRACTION} 7\n"
