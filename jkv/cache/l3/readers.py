"""Threads that read from a store, in order."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from jkv.cache.l3.objects import ObjectError, Operation
from jkv.cache.l3.reasons import Reason

_log = logging.getLogger(__name__)


class Cancellable:
    """A job that any thread may cancel, be it queued or at an operation. It ends once: one of `cancel` and
    `finish`, the first, decides how.
    """

    def __init__(self, cancelled: Callable[[], None]) -> None:
        self._cancelled = cancelled
        self._lock = threading.Lock()
        self._operation: Operation | None = None
        self._ended = False

    def run(self, start: Callable[[], Operation]) -> bytes | None:
        """Starts an operation and returns its result.

        Raises:
            ObjectError: it failed or was cancelled.
        """
        with self._lock:
            if self._ended:
                raise ObjectError(Reason.CANCELLED, "cancelled")
            self._operation = start()
        return self._operation.result()

    def finish(self) -> bool:
        """Whether the job may tell its outcome: it was not cancelled before."""
        with self._lock:
            first, self._ended = not self._ended, True
        return first

    def cancel(self) -> None:
        """Calls `cancelled` at once, on this thread, if the job has not finished: a store that hangs keeps
        nobody waiting.
        """
        if not self.finish():
            return
        if self._operation is not None:
            self._operation.cancel()
        self._cancelled()


class Readers:
    """Threads that take jobs first in, first out. Jobs handle their own errors."""

    def __init__(self, name: str, threads: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Waits for the jobs submitted so far, then ends the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                _log.exception("a job of the L3 store failed")
            del job  # its page may be large, and the next job may be long in coming
