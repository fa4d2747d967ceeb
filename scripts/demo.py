"""Serves the default model and shows what its KV cache saves; `scripts/demo` installs what this needs."""

from __future__ import annotations

import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import grpc

from jkv.api import jkv_pb2 as pb
from jkv.client import show
from jkv.client.rpc import CallError, Generation, connect, generate

_SYSTEM = "You are a helpful assistant."
_QUESTION = "Tell me a short story about a lighthouse."
_FOLLOW_UP = "Give the story a title."
_LOG_DAYS = 130
_LOG_PREFIX = re.compile(r"^\S+ \S+ \S+ [A-Z]+ [\w.]+: ")
_STOP_S = 10.0
_NEXT = """
Where to go next
  .venv/bin/python -m jkv.serve            serve the model at 127.0.0.1:50051; --help lists the flags
  .venv/bin/jkv chat                       talk to it from another terminal
  README.md, docs/                         the gRPC API, operations, how it works
"""


class DemoError(Exception):
    """The demo cannot show what it should."""


class Server:
    """`python -m jkv.serve` on a free port.

    It has a session of its own, so that Ctrl-C reaches only the demo, which then stops the whole session.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jkv.serve", "--grpc-port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._recent: deque[str] = deque(maxlen=20)
        threading.Thread(target=self._read, daemon=True).start()

    def wait_until_ready(self) -> str:
        """Shows what the server reports while it starts; returns its address.

        Raises:
            DemoError: it ended instead; the message has its last lines.
        """
        started, message = time.monotonic(), ""
        while True:
            try:
                line = self._lines.get(timeout=1)
            except queue.Empty:
                _redraw(f"  {message} ({time.monotonic() - started:.0f} s)")
                continue
            if line is None:
                last = "\n  ".join(self._recent)
                raise DemoError(f"the server ended with status {self._process.wait()}:\n  {last}")
            if line.startswith("ready: "):
                _redraw("")
                print(f"{line} after {time.monotonic() - started:.0f} s")
                return line.rpartition(" ")[2]
            message = _LOG_PREFIX.sub("", line).strip()
            _status(message)

    def stop(self) -> None:
        """Ends the server and whatever it has started."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave it behind
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                continue

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._recent.append(line.rstrip())
            self._lines.put(line.rstrip())
        self._lines.put(None)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table: where a prompt's pages came from, and how long its first token took."""

    tier: str
    result: Generation

    def cells(self, cold: Generation) -> tuple[str, ...]:
        usage, ttft = self.result.usage, _ttft(self.result)
        return (
            self.tier,
            str(usage["prompt_tokens"]),
            str(usage["cached_tokens"]),
            f"{ttft * 1000:.0f} ms",
            f"{_ttft(cold) / ttft:.1f}x",
        )


def main() -> int:
    """0 when everything was shown, 1 when something failed, 130 after Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        print("Starting python -m jkv.serve; the first start fetches the model and compiles for minutes.")
        with _server() as address, connect(address) as channel:
            _chat(channel)
            _long_prompt(channel)
        print(_NEXT)
    except (DemoError, CallError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted", file=sys.stderr)
        return 130
    return 0


@contextmanager
def _server() -> Iterator[str]:
    server = Server()
    try:
        yield server.wait_until_ready()
    finally:
        server.stop()
        _redraw("")
        print("The server has stopped.")


def _chat(channel: grpc.Channel) -> None:
    """Two turns; the second one finds the pages that the first one's answer filled."""
    request = pb.GenerateRequest(sampling=pb.Sampling(temperature=0, max_tokens=160))
    history = request.messages.messages
    history.add(role="system", content=_SYSTEM)
    print("\n1. A chat. The answer streams; its tokens fill pages of the L1 cache.")
    first = _turn(channel, request, _QUESTION)
    print("\n2. The next turn sends the whole chat again; L1 has its full pages of 64 tokens.")
    second = _turn(channel, request, _FOLLOW_UP)
    cached, prompt = second.usage["cached_by_tier"]["l1"], first.usage["prompt_tokens"]
    if cached <= prompt:
        raise DemoError(f"turn 2 found {cached} tokens in L1, no more than turn 1's prompt of {prompt}")
    print(f"{cached} tokens came from L1; at least {cached - prompt} of them were generated in turn 1.")


def _turn(channel: grpc.Channel, request: pb.GenerateRequest, text: str) -> Generation:
    request.messages.messages.add(role="user", content=text)
    print(f"> {text}")
    result = generate(channel, request, None, show.print_chunk)
    request.messages.messages.add(role="assistant", content=result.choices[0].text)
    print(f"\n[{show.usage_line(result)}]")
    return result


def _long_prompt(channel: grpc.Channel) -> None:
    """The same long prompt twice: computed, then from L1."""
    request = pb.GenerateRequest(prompt=_logbook(), sampling=pb.Sampling(temperature=0, max_tokens=8))
    print("\n3. A long prompt, never seen before, then the same again.")
    rows = []
    for tier in ("none (cold)", "L1, device"):
        _status(f"computing: {tier}")
        rows.append(Row(tier=tier, result=generate(channel, request, None, show.print_nothing)))
    _redraw("")
    cold, *hits = (row.result for row in rows)
    if cold.usage["cached_tokens"] or not all(hit.usage["cached_by_tier"]["l1"] for hit in hits):
        raise DemoError(f"expected a miss and then hits in L1, got {[row.result.usage for row in rows]}")
    head = ("tier", "prompt tokens", "cached tokens", "TTFT", "speed-up")
    _print_table([head, *(row.cells(cold) for row in rows)])
    same = all(hit.choices[0].token_ids == cold.choices[0].token_ids for hit in hits)
    print(f"The generated tokens are {'the same' if same else 'NOT the same'}.")


def _logbook() -> str:
    """About 3,000 tokens of text that no server has in its cache by chance."""
    draw = random.Random(time.time_ns())
    winds, works = ("northern", "southern", "eastern", "western"), ("lamp", "stairs", "boat", "radio", "roof")
    days = (
        f"Day {day}: a {draw.choice(winds)} wind, {draw.randint(2, 40)} ships passed, "
        f"and the keeper repaired the {draw.choice(works)}."
        for day in range(1, _LOG_DAYS + 1)
    )
    return "The logbook of a lighthouse.\n" + "\n".join(days) + "\nIn short, the keeper"


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print("  ".join(("", first.ljust(widths[0]), *numbers)))


def _ttft(result: Generation) -> float:
    if result.ttft is None:
        raise DemoError("no token arrived")
    return result.ttft


def _status(text: str) -> None:
    """A line of progress, which the next one overwrites on a terminal."""
    if not _redraw(f"  {text}"):
        print(f"  {text}", flush=True)


def _redraw(text: str) -> bool:
    """Overwrites the current line of a terminal; False where there is none."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1  # a full line would wrap and stay
        print(f"\r\x1b[K{text[:width]}", end="", flush=True)
    return sys.stdout.isatty()


def _leave(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
