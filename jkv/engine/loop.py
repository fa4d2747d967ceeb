"""The engine's thread: the one owner of the scheduler, the page pool and the device."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from jkv.cache.keys import request_root
from jkv.engine.outbox import Outbox, Reader
from jkv.engine.report import ActivityReport, describe_l1
from jkv.engine.request import CachedByTier, EngineRequest, FinishReason, Logprob, TokenOutput
from jkv.engine.runner import Pending, Runner
from jkv.engine.scheduler import Chunk, Scheduler
from jkv.engine.sequence import Sequence
from jkv.engine.stats import EngineStats
from jkv.engine.transfers import Transfers
from jkv.errors import OverloadedError, ShuttingDownError

_log = logging.getLogger(__name__)
_CHECK_EVERY_S = 30.0
_RETRY_S = (0.05, 60.0)

Inbox = queue.SimpleQueue[Callable[[], None]]


# For what L3 has under way when its time is up, and for the order of its pages.
_CLOSE_S = 10.0
# How often a loop that waits for pages looks whether a deadline has passed.
_STALL_S = 0.02

R = TypeVar("R")


@dataclass(eq=False)
class Ticket:
    """A submitted request. Its reader gets its outputs in order, the last one with a finish reason.

    `cached` is known from its first token on.
    """

    request: EngineRequest
    reader: Reader
    seq: Sequence | None = field(default=None)
    cached: CachedByTier = field(default_factory=CachedByTier)


class EngineLoop:
    """Runs steps while there is work, one step ahead of reading their tokens.

    `submit`, `abort`, `call`, `stats` and `stop` may be called from any thread; everything else belongs to
    the loop's own. `inbox` holds what other threads want done on it; `after_turn` is called whenever
    something may have changed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        inbox: Inbox,
        *,
        model_root: bytes,
        eos: frozenset[int],
        max_queue: int,
        write_out_s: float,
    ) -> None:
        self.scheduler, self.transfers, self.model_root = scheduler, Transfers(scheduler, runner), model_root
        self._runner, self._inbox = runner, inbox
        self.after_turn: Callable[[], None] = lambda: None
        self._eos, self._max_queue, self._write_out_s = eos, max_queue, write_out_s
        self._tickets: dict[Sequence, Ticket] = {}
        self._outbox = Outbox()
        self._arrivals = itertools.count()
        self._lock = threading.Lock()  # guards _alive, _open and _finish_interval
        self._alive = 0
        self._open = True
        self._finish_interval = 1.0  # seconds between finished requests, smoothed
        self._last_finish = time.monotonic()
        self._last_check = time.monotonic()
        self._totals = {"steps": 0, "prompt_tokens": 0, "cached_tokens": 0, "generated_tokens": 0}
        self._stats = EngineStats(l1=scheduler.pool.counts())
        self._report = ActivityReport(self._stats)
        self._stopping = False
        self._stalled = False  # nothing can go on before something arrives
        self._step_tokens, self._step_since = 0, 0.0  # of the step under way, if it only prefills
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.ended: Future[None] = Future()  # settled when the thread has ended, after `stop` or by itself

    def start(self) -> None:
        self._thread.start()

    @property
    def stats(self) -> EngineStats:
        return self._stats

    def submit(self, request: EngineRequest, reader: Reader) -> Ticket:
        """Queues a request.

        Raises:
            OverloadedError: as many wait as may.
            ShuttingDownError: after `close`.
        """
        ticket = Ticket(request, reader)
        with self._lock:
            if not self._open:
                raise ShuttingDownError("the engine is shutting down")
            waiting = self._alive - self.scheduler.limits.max_num_seqs
            if waiting >= self._max_queue:
                low, high = _RETRY_S
                raise OverloadedError(
                    f"{waiting} requests wait, which is all that --max-queue {self._max_queue} allows",
                    retry_after_s=min(max(self._finish_interval, low), high),
                )
            self._alive += 1
            # Under the lock, so that it comes before the "stop" that follows `close`.
            self._inbox.put(partial(self._accept, ticket))
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """Cancels a request at the next step; one that has ended is left alone."""
        self._inbox.put(partial(self._cancel, ticket))

    def call(self, function: Callable[[Future[R]], None]) -> Future[R]:
        """Has `function` called between two steps; it settles the future it is given, then or later."""
        future: Future[R] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                function(future)
            except Exception as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def post(self, action: Callable[[], None]) -> None:
        """Has an action done between two steps."""
        self._inbox.put(action)

    @property
    def alive(self) -> int:
        """Requests submitted and not ended."""
        with self._lock:
            return self._alive

    @property
    def open(self) -> bool:
        """Whether it takes new requests."""
        with self._lock:
            return self._open

    def close(self) -> None:
        """Takes no new requests; those submitted go on."""
        with self._lock:
            self._open = False

    def stop(self) -> None:
        """Cancels what is left and ends the thread."""
        self.close()
        self._inbox.put(self._stop)
        self._thread.join()

    @property
    def running(self) -> bool:
        """False once the thread has ended, after `stop` or because it could not go on."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            _log.critical("the engine cannot go on", exc_info=True)
            self.close()
            self._take_inbox(block=False)  # requests that came just before are answered as well
            for seq in list(self._tickets):
                self._close_ticket(seq, FinishReason.ERROR, None, "the engine failed")
            self._outbox.send()
        finally:
            self.ended.set_result(None)

    def _serve(self) -> None:
        pending: Pending | None = None
        while not self._stopping:
            idle = pending is None and self.scheduler.idle and self.transfers.idle
            if idle:
                _log.debug("idle, %s", describe_l1(self._stats.l1))
            self._take_inbox(block=idle or self._stalled, timeout=None if idle else _STALL_S)
            if idle:
                self._report.resume(time.monotonic())
            try:
                if idle:
                    self._check_now_and_then()
                pending = self._turn(pending)
            except Exception:
                _log.exception("a step failed; its requests end with an error and the L1 cache starts empty")
                self._fail_all()
                pending = None
        for seq in list(self._tickets):
            self._end(seq, FinishReason.CANCELLED, error="the server shut down")
        self._outbox.send()
        self._write_out()
        self._runner.close()

    def _turn(self, pending: Pending | None) -> Pending | None:
        """Dispatches the next step, then reads the one before it while the device works."""
        self._expire()
        chunks = self.scheduler.schedule()
        moved = self.transfers.before_step(alone=pending is None)
        following = self._runner.dispatch(chunks) if chunks else None
        if pending is not None:
            for seq, token, logprob in pending.read():
                self._commit(seq, token, logprob)
            self._measure_prefill()
        self.transfers.after_step()
        self._stalled = not chunks and pending is None and not moved
        self._note_step(chunks)
        self._snapshot()
        self._outbox.send()
        self.after_turn()
        if line := self._report.observe(self._stats, time.monotonic()):
            _log.info(line)
        return following

    def _note_step(self, chunks: Seq[Chunk]) -> None:
        self._totals["steps"] += bool(chunks)
        prefill = all(c.count > 1 for c in chunks)
        self._step_tokens = sum(c.count for c in chunks) if prefill else 0
        self._step_since = time.monotonic()

    def _measure_prefill(self) -> None:
        """The step just read ran since the one before it was read, for there always is a next one waiting."""
        if self._step_tokens >= self.scheduler.pool.page_size:
            gate = self.scheduler.lower.gate
            gate.record_prefill(self._step_tokens, time.monotonic() - self._step_since)

    def _commit(self, seq: Sequence, token: int, logprob: Logprob | None) -> None:
        if seq.finish_reason is not None:
            return  # it ended while this step was on its way
        ticket = self._tickets[seq]
        first = len(seq.tokens) == seq.prompt_len + len(seq.request.resumed)
        if first:
            self._totals["prompt_tokens"] += seq.prompt_len
            self._totals["cached_tokens"] += seq.cached_tokens
            ticket.cached = seq.cached_by_tier
        self._totals["generated_tokens"] += 1
        self.scheduler.commit(seq, token)
        reason = self._finish_reason(seq, token)
        output = TokenOutput(
            token_ids=(token,),
            logprobs=() if logprob is None else (logprob,),
            finish_reason=reason,
            cached=ticket.cached,
        )
        if reason is None:
            self._outbox.put(ticket.reader, output)
        else:
            self._end(seq, reason, output)

    def _finish_reason(self, seq: Sequence, token: int) -> FinishReason | None:
        sampling = seq.request.sampling
        if token in sampling.stop_token_ids or (token in self._eos and not sampling.ignore_eos):
            return FinishReason.STOP
        if len(seq.tokens) - seq.prompt_len >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def _end(
        self, seq: Sequence, reason: FinishReason, output: TokenOutput | None = None, *, error: str = ""
    ) -> None:
        self.scheduler.finish(seq, reason)
        self._close_ticket(seq, reason, output, error)

    def _close_ticket(
        self, seq: Sequence, reason: FinishReason, output: TokenOutput | None, error: str
    ) -> None:
        ticket = self._tickets.pop(seq)
        now = time.monotonic()
        with self._lock:
            self._alive -= 1
            self._finish_interval += 0.2 * (now - self._last_finish - self._finish_interval)
        self._last_finish = now
        if output is None:
            output = TokenOutput(finish_reason=reason, cached=seq.cached_by_tier, error=error)
        self._outbox.put(ticket.reader, output)

    def _fail_all(self) -> None:
        for seq in self.scheduler.abandon():
            seq.finish_reason = FinishReason.ERROR
            self._close_ticket(seq, FinishReason.ERROR, None, "the step that computed this request failed")
        self._runner.reset()
        self.transfers.failed()
        self._snapshot()
        self._outbox.send()

    def _expire(self) -> None:
        now = time.monotonic()
        for seq in [*self.scheduler.waiting, *self.scheduler.running]:
            if seq.request.deadline is not None and now >= seq.request.deadline:
                self._end(seq, FinishReason.CANCELLED, error="the deadline passed")

    def _take_inbox(self, *, block: bool, timeout: float | None = None) -> None:
        """Does what other threads have asked for; waits for the first of it if told to."""
        while True:
            try:
                action = self._inbox.get(block=block, timeout=timeout)
            except queue.Empty:
                return
            block = False
            action()

    def _accept(self, ticket: Ticket) -> None:
        root = request_root(self.model_root, cache_salt=ticket.request.cache_salt)
        ticket.seq = Sequence(request=ticket.request, root=root, arrival=next(self._arrivals))
        self._tickets[ticket.seq] = ticket
        self.scheduler.add(ticket.seq)

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.seq is not None and ticket.seq.finish_reason is None:
            self._end(ticket.seq, FinishReason.CANCELLED)

    def _stop(self) -> None:
        self._stopping = True

    def _write_out(self) -> None:
        """Puts into L3 what is yet to be written, for as long as is allowed, and ends it."""
        lower = self.scheduler.lower
        if lower.disk is not None:
            deadline = time.monotonic() + self._write_out_s
            lower.flush_dirty()
            self._await_writes(deadline)
            while lower.policy.write == "write-back" and time.monotonic() < deadline:
                if not self.transfers.write_down():
                    break
                self._await_writes(deadline)
            if lower.pending_writes:
                _log.warning("%d pages were not written to L3 in time", lower.pending_writes)
        # On a thread that the process does not wait for: a disk that hangs must not keep it from ending.
        closing = threading.Thread(target=lower.close, name="l3-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        if closing.is_alive():
            _log.warning("L3 does not answer; it is left without a clean end")

    def _await_writes(self, deadline: float) -> None:
        while self.scheduler.lower.pending_writes and time.monotonic() < deadline:
            self._take_inbox(block=True, timeout=_STALL_S)

    def _check_now_and_then(self) -> None:
        now = time.monotonic()
        if now - self._last_check > _CHECK_EVERY_S:
            self._last_check = now
            self.scheduler.check()

    def _snapshot(self) -> None:
        self._stats = EngineStats(
            **self._totals,
            preemptions=self.scheduler.preemptions,
            evictions=self.scheduler.pool.evictions,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            l1=self.scheduler.pool.counts(),
        )
