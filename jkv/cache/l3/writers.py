"""Threads that change a store, in order for each key, and that nobody waits for where the store hangs."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jkv.cache.l3.reasons import Reason

_log = logging.getLogger(__name__)

# How often in a timeout it is looked whether one has passed.
_LOOKS = 8


class Turn:
    """A job from its submission to its end, which is told once: by the job, or as a refusal."""

    def __init__(self, job: Callable[[Turn], None], refused: Callable[[Reason], None]) -> None:
        self.job = job
        self.asking_since: float | None = None  # None before its turn, and while it waits for others
        self._refused = refused
        self._lock = threading.Lock()
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether nobody wants to hear of it any more."""
        return self._ended

    def finish(self) -> bool:
        """Whether the job may tell its outcome: it was not refused before."""
        with self._lock:
            first, self._ended = not self._ended, True
        return first

    def refuse(self, reason: Reason) -> None:
        if self.finish():
            self._refused(reason)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For the job itself: the time it takes is not the store's."""
        self.asking_since = None
        try:
            yield
        finally:
            self.asking_since = time.monotonic()


class Writers:
    """Threads, one for each part of the keys, that take jobs first in, first out.

    A job that keeps asking the store for longer than `timeout_s` is refused for Reason.TIMEOUT: so are those
    behind it, which never run, and all that come until it has ended after all. So a store that hangs costs
    the memory of one job a thread, and its outcomes come all the same. A job that raises is refused for
    Reason.IO.
    """

    def __init__(self, name: str, threads: int, timeout_s: float) -> None:
        self._writers = [_Writer(f"{name}-{number}", timeout_s) for number in range(threads)]
        self._pause_s = timeout_s / _LOOKS
        self._closed = threading.Event()
        threading.Thread(target=self._look, name=f"{name}-timeout", daemon=True).start()

    def submit(
        self, key: bytes, job: Callable[[Turn], None], refused: Callable[[Reason], None]
    ) -> Reason | None:
        """Queues a job; a reason where it is not taken, and then `refused` is not called."""
        return self._writers[key[-1] % len(self._writers)].submit(Turn(job, refused))

    def close(self) -> bool:
        """Waits for the jobs submitted so far, then ends the threads; False where the store hangs, and a job
        may still change it.
        """
        ended = [writer.close() for writer in self._writers]
        self._closed.set()
        return all(ended)

    def _look(self) -> None:
        while not self._closed.wait(self._pause_s):
            for writer in self._writers:
                writer.refuse_overdue()


class _Writer:
    """One thread and its queue."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._changed = threading.Condition()  # guards all below
        self._queue: deque[Turn] = deque()
        self._running: Turn | None = None
        self._hangs = self._closing = self._ended = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, turn: Turn) -> Reason | None:
        with self._changed:
            if self._hangs:
                return Reason.TIMEOUT
            self._queue.append(turn)
            self._changed.notify_all()
        return None

    def refuse_overdue(self) -> None:
        with self._changed:
            turn = self._running
            since = None if turn is None else turn.asking_since
            if turn is None or since is None or time.monotonic() - since < self._timeout_s:
                return
            refused = [turn, *self._queue]
            self._queue.clear()
            if not self._hangs:
                _log.warning("L3 has not answered %s for %g s", self._name, self._timeout_s)
            self._hangs = True
            self._changed.notify_all()
        for turn in refused:
            turn.refuse(Reason.TIMEOUT)

    def close(self) -> bool:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended or self._hangs)
            return self._ended

    def _run(self) -> None:
        while self._take():
            turn = self._running
            assert turn is not None
            try:
                turn.job(turn)
            except Exception:
                _log.exception("a job of the L3 store failed")
                turn.refuse(Reason.IO)
            del turn  # its page may be large, and the next job may be long in coming
            self._done()

    def _take(self) -> bool:
        """Waits for the next job; False where none will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                self._ended = True
                self._changed.notify_all()
                return False
            self._running = self._queue.popleft()
            self._running.asking_since = time.monotonic()
            return True

    def _done(self) -> None:
        with self._changed:
            self._running = None
            if self._hangs:
                _log.warning("L3 answers %s again", self._name)
            self._hangs = False
