"""`python -m jkv.router` as a process, in front of engine doubles that are processes too."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.router.__main__ import main
from tests.router.rig import PROMPT, prompt

RSS_LIMIT_MB = 150


class Process:
    """A Python process whose output is read line by line."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    @property
    def rss_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) / 1024


@contextmanager
def processes(*commands: tuple[str, ...]) -> Iterator[list[Process]]:
    started = [Process(*command) for command in commands]
    try:
        yield started
    finally:
        for one in started:
            one.process.kill()
            one.process.wait()
            assert one.process.stdout is not None
            one.process.stdout.close()


@contextmanager
def routed(*engines: Process) -> Iterator[tuple[Process, grpc.Channel]]:
    """A router of these doubles, once it is ready."""
    addresses = ",".join(engine.line() for engine in engines)
    flags = ("--grpc-port", "0", "--engines", addresses, "--suspect-after", "1")
    command = ("-m", "jkv.router", *flags)
    with processes(command) as (router,):
        address = re.fullmatch(r"listening on (\S+), waiting for engines", router.line())
        assert address is not None
        assert router.line() == f"ready: default on {address[1]}"
        with grpc.insecure_channel(address[1]) as channel:
            yield router, channel


def _double(id: str, delay: float = 0.0) -> tuple[str, ...]:
    return ("-m", "tests.router.doubles", id, "0", str(delay))


def _status(channel: grpc.Channel) -> dict[str, pb.EngineStatus]:
    stub: Any = pb_grpc.RouterStub(channel)
    return {one.id: one for one in stub.Status(pb.RouterStatusRequest(), timeout=5).engines}


def _wait(condition: Any, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.05)


def test_it_is_small_and_never_imports_jax() -> None:
    code = (
        "import sys; import jkv.router.__main__; "
        "print([name for name in ('jax', 'jaxlib', 'flax', 'tensorstore') if name in sys.modules])"
    )
    with processes(("-c", code), _double("one")) as (imports, double):
        assert imports.line() == "[]"
        with routed(double) as (router, channel):
            stub: Any = pb_grpc.GenerationStub(channel)
            assert list(stub.Generate(prompt(), timeout=10))[-1].finish_reason
            assert router.rss_mb < RSS_LIMIT_MB
            reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            (answer,) = reflection.ServerReflectionInfo(iter([ask]))
            names = {service.name for service in answer.list_services_response.service}
            assert {"jkv.v1.Generation", "jkv.v1.Router", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_engines_are_killed_and_stopped_in_mid_stream(fault: signal.Signals) -> None:
    with processes(_double("one", 0.03), _double("two", 0.03)) as doubles, routed(*doubles) as (_, channel):
        stub: Any = pb_grpc.GenerationStub(channel)
        request = prompt(ignore_eos=True, max_tokens=40)
        request.no_cache = True
        whole = "".join(chunk.text for chunk in stub.Generate(request, timeout=20))
        call = stub.Generate(request, timeout=20)
        text = next(call).text
        busy = dict(call.initial_metadata())["jkv-engine"]
        doubles[0 if busy == "one" else 1].signal(fault)
        started = time.monotonic()
        text += "".join(chunk.text for chunk in call)
        assert text == whole
        assert time.monotonic() - started < 8
        served = [value for key, value in call.trailing_metadata() if key == "jkv-engine"]
        assert served == [busy, "two" if busy == "one" else "one"]
        _wait(lambda: _status(channel)[busy].state in ("connecting", "suspect"))
        if fault is signal.SIGSTOP:
            doubles[0 if busy == "one" else 1].signal(signal.SIGCONT)
            _wait(lambda: _status(channel)[busy].state == "serving", 30)


def _ask_until_refused(stub: Any) -> None:
    for _ in range(1000):  # it takes a moment to notice a signal
        list(stub.Generate(prompt(max_tokens=1), timeout=5))


def test_sigterm_lets_running_requests_end() -> None:
    with processes(_double("one", 0.02)) as doubles, routed(*doubles) as (router, channel):
        stub: Any = pb_grpc.GenerationStub(channel)
        call = stub.Generate(prompt(ignore_eos=True, max_tokens=40), timeout=20)
        next(call)
        router.signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError, match="shutting down"):
            _ask_until_refused(stub)
        assert list(call)[-1].usage.completion_tokens == 40
        assert router.process.wait(10) == 0


def test_a_router_without_engines_listens_and_stops() -> None:
    with processes(("-m", "jkv.router", "--grpc-port", "0", "--engines", "127.0.0.1:1")) as (router,):
        address = router.line().split()[2].rstrip(",")
        with grpc.insecure_channel(address) as channel:
            stub: Any = pb_grpc.GenerationStub(channel)
            with pytest.raises(grpc.RpcError, match=r"no engine serves: 127.0.0.1:1 .* is connecting"):
                list(stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT)), timeout=10))
        router.signal(signal.SIGINT)
        assert router.process.wait(10) == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["--etcd", "--engines"]),
        (["--etcd", "a:1", "--engines", "b:2"], ["--etcd", "--engines"]),
        (["--engines", "here"], ["--engines 'here'", "HOST:PORT"]),
        (["--engines", "a:1,a:1"], ["--engines", "twice"]),
        (["--engines", "a:99999"], ["a:99999"]),
        (["--engines", "a:1", "--policy", "best"], ["--policy best", "cache-aware"]),
        (["--engines", "a:1", "--suspect-after", "0"], ["--suspect-after 0.0"]),
        (["--engines", "a:1", "--etcd-user", "me"], ["--etcd-user", "needs --etcd"]),
        (["--etcd", "a:1", "--etcd-user", "me"], ["--etcd-user", "--etcd-password-file"]),
        (["--etcd", "a:1", "--etcd-cert", "c", "--etcd-key", "k"], ["--etcd-ca"]),
        (["--etcd", "a:1", "--cluster", "a/b"], ["--cluster 'a/b'"]),
        (["--etcd", "a:1", "--etcd-ca", "/no/such/file"], ["--etcd-ca /no/such/file"]),
        (["--engines", "a:1", "--host", "no such host"], ["--host no such host"]),
    ],
)
def test_unusable_flags_are_one_line_and_status_2(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "--grpc-port", "0"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    for word in words:
        assert word in err
