"""The demo's processes, and what it takes to leave nothing behind."""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_LOG_PREFIX = re.compile(r"^\S+ \S+ \S+ [A-Z]+ [\w.]+: ")
_STOP_S = 10.0


class DemoError(Exception):
    """The demo cannot show what it should."""


class Process:
    """A command, with what it prints.

    It has a session of its own, so that Ctrl-C reaches only the demo, which then stops the whole session.
    """

    def __init__(self, name: str, command: Sequence[str], **variables: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._recent: deque[str] = deque(maxlen=20)
        self._killed = False
        threading.Thread(target=self._read, daemon=True).start()

    def wait_until_ready(self) -> str:
        """Shows what a server reports while it starts; returns its address.

        Raises:
            DemoError: it ended instead; the message has its last lines.
        """
        started, message = time.monotonic(), ""
        while True:
            try:
                line = self._lines.get(timeout=1)
            except queue.Empty:
                redraw(f"  {message} ({time.monotonic() - started:.0f} s)")
                continue
            if line is None:
                raise self.ended()
            if line.startswith("ready: "):
                redraw("")
                print(f"{line} after {time.monotonic() - started:.0f} s")
                return line.rpartition(" ")[2]
            message = _LOG_PREFIX.sub("", line).strip()
            status(message)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ended(self) -> DemoError:
        """Why it did, as far as its last lines say."""
        last = "\n  ".join(self._recent)
        return DemoError(f"{self.name} ended with status {self._process.wait()}:\n  {last}")

    def kill(self) -> None:
        """SIGKILL, as a fault to show."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._killed = True

    def stop(self) -> None:
        """Ends the process and whatever it has started."""
        if self._killed:
            return
        was_running = self.is_running
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                continue
        if was_running:
            redraw("")
            print(f"{self.name} has stopped.")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._recent.append(line.rstrip())
            self._lines.put(line.rstrip())
        self._lines.put(None)


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that is ready."""

    address: str
    process: Process


@contextmanager
def running(process: Process) -> Iterator[Process]:
    """The process, which is gone afterwards."""
    try:
        yield process
    finally:
        with _uninterrupted():
            process.stop()


@contextmanager
def serving(name: str, *flags: str, module: str = "jkv.serve") -> Iterator[Server]:
    """`python -m MODULE` on a free port, ready, and gone afterwards."""
    command = [sys.executable, "-m", module, "--grpc-port", "0", *flags]
    with running(Process(name, command)) as process:
        yield Server(address=process.wait_until_ready(), process=process)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is removed with all that is in it."""
    path = Path(tempfile.mkdtemp(prefix="jkv-demo-"))
    try:
        yield path
    finally:
        with _uninterrupted():
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Holds signals back until the block is done: a second Ctrl-C must not stop the cleaning up."""
    held: list[int] = []

    def hold(number: int, _: FrameType | None) -> None:
        held.append(number)

    handlers = {
        number: signal.signal(number, hold) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number in held[:1]:
        signal.raise_signal(number)


def status(text: str) -> None:
    """A line of progress, which the next one overwrites on a terminal."""
    if not redraw(f"  {text}"):
        print(f"  {text}", flush=True)


def redraw(text: str) -> bool:
    """Overwrites the current line of a terminal; False where there is none."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1  # a full line would wrap and stay
        print(f"\r\x1b[K{text[:width]}", end="", flush=True)
    return sys.stdout.isatty()
