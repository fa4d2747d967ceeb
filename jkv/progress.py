"""How long work shows where it stands: a line that updates on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from typing import TextIO


class ProgressLine:
    """Takes messages from any thread; those that start with the same word are one stage.

    On a terminal a stage has one line, which its next message overwrites. Elsewhere `log` gets the first
    message of each stage, further ones at most every `every_s` seconds, and the last one of all.
    """

    def __init__(
        self,
        log: Callable[[str], None],
        terminal: TextIO | None,
        *,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._terminal, self._every_s, self._clock = log, terminal, every_s, clock
        self._lock = threading.Lock()
        self._stage = ""
        self._logged_at = 0.0
        self._held_back = ""
        self._drawn = False  # the terminal's cursor stands behind a message
        self._closed = False

    def __call__(self, message: str) -> None:
        with self._lock:
            if self._closed:
                return
            stage = message.split(" ", 1)[0]
            before, self._stage = self._stage, stage
            if self._terminal is not None:
                if before != stage:
                    self._end_line()
                self._draw(self._terminal, message)
                return
            now, self._held_back = self._clock(), message
            if before != stage or now - self._logged_at >= self._every_s:
                self._logged_at, self._held_back = now, ""
                self._log(message)

    def close(self) -> None:
        """Ends the line; messages that still come are dropped."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._end_line()
            if self._held_back:
                self._log(self._held_back)

    def make_room(self, record: object) -> bool:
        """A filter for the log handlers of the same terminal: what they write starts on a line of its own."""
        with self._lock:
            self._end_line()
        return True

    def _draw(self, terminal: TextIO, message: str) -> None:
        width = shutil.get_terminal_size().columns - 1  # a full line would wrap and stay
        terminal.write(f"\r\x1b[K{message[:width]}")
        terminal.flush()
        self._drawn = True

    def _end_line(self) -> None:
        if self._terminal is not None and self._drawn:
            self._terminal.write("\n")
            self._terminal.flush()
        self._drawn = False
