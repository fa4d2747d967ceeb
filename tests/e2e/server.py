"""`python -m jkv.serve` and other commands as processes of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jkv.api import jkv_pb2_grpc as pb_grpc

T = TypeVar("T")

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
TINY = GOLDEN / "tiny" / "llama3"
START_S = 300.0  # for a cold compile cache on a busy machine
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_IDLE = re.compile(r"idle, L1 (\d+) pages in use \+ (\d+) cached \+ (\d+) free = (\d+)")


def environment(**changes: str) -> dict[str, str]:
    """This process's, on the CPU unless it says otherwise."""
    return {"JAX_PLATFORMS": "cpu", **os.environ, **changes}


def run(*command: str, timeout: float = 120.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python -m COMMAND` until it ends."""
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(),
        check=False,
        **options,
    )


def wait_for(look: Callable[[], T | None], what: str, timeout: float) -> T:
    """The first result of `look` that is true."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {timeout:g} s")


class Server:
    """A server on a free port, logging at debug level into files of `directory`."""

    def __init__(self, directory: Path, *flags: str, stderr: int | None = None, **variables: str) -> None:
        self._stdout, self._stderr = directory / "stdout", directory / "stderr"
        with self._stdout.open("w") as out, self._stderr.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jkv.serve", "--grpc-port", "0", "--log-level", "debug", *flags],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err if stderr is None else stderr,
                env=environment(**variables),
                start_new_session=True,
            )
        try:
            self.address = self._find(self._stdout, r"^listening on (\S+), loading", START_S)[1]
        except BaseException:
            self.kill()
            raise
        self.channel = grpc.insecure_channel(self.address)
        self.stub: Any = pb_grpc.GenerationStub(self.channel)

    @property
    def stdout(self) -> str:
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    @property
    def metrics_address(self) -> str:
        return self._find(self._stderr, r"metrics at http://([^/]+)/metrics", 10)[1]

    def health(self, service: str = "") -> int:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status

    def wait_ready(self) -> None:
        self._find(self._stdout, rf"^ready: \S+ on {re.escape(self.address)}$", START_S)

    def wait_logged(self, pattern: str, timeout: float = 30.0) -> None:
        self._find(self._stderr, pattern, timeout)

    def idle_lines(self) -> list[tuple[int, ...]]:
        """L1 pages in use, cached, free and in all, for every time that the engine had nothing to do."""
        return [tuple(map(int, counts)) for counts in _IDLE.findall(self.stderr)]

    def wait_idle(self, before: list[tuple[int, ...]], timeout: float = 20.0) -> tuple[int, ...]:
        """The next such line after `before`, which was taken while the engine worked."""

        def look() -> tuple[int, ...] | None:
            lines = self.idle_lines()
            return lines[len(before)] if len(lines) > len(before) else None

        return wait_for(look, "the engine is idle", timeout)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process, and whatever it started, and reap it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if hasattr(self, "channel"):
            self.channel.close()

    def _find(self, file: Path, pattern: str, timeout: float) -> re.Match[str]:
        def look() -> re.Match[str] | None:
            ended = self.process.poll() is not None
            found = re.search(pattern, file.read_text(), re.MULTILINE)
            assert found or not ended, f"the server has ended:\n{self.stdout}{self.stderr}"
            return found

        return wait_for(look, f"{pattern!r} in the server's output", timeout)


@contextmanager
def serving(directory: Path, *flags: str, **options: Any) -> Iterator[Server]:
    """A server that is ready, and gone afterwards."""
    server = Server(directory, *flags, **options)
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()
