"""A cluster in virtual time: simulated engines behind the router's own index, scores and policies."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from jkv.bench.cluster_engine import Job, SimCache, SimEngine, Speeds
from jkv.router.index import page_hashes
from jkv.router.load import EngineLoads, InFlight
from jkv.router.policy import policy
from jkv.router.routing import Prompt, Routing, Target

# From a change in an engine to its arrival at the router, and between two reports of load.
_DELTA_S = 0.01
_REPORT_S = 0.05


@dataclass(frozen=True, kw_only=True)
class SimShape:
    """What a cluster is made of."""

    engines: int
    speeds: Speeds
    page_size: int
    l1_pages: int
    l2_pages: int
    policy: str
    seed: int


class Simulation:
    """Runs jobs to their ends. An event is a time and what happens then."""

    def __init__(self, shape: SimShape) -> None:
        self.now = 0.0
        self._shape = shape
        self._routing = Routing(policy(shape.policy, seed=shape.seed))
        self._members = [self._member(number) for number in range(shape.engines)]
        self._targets = [member.target for member in self._members]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def run(self, jobs: Iterable[Job]) -> list[Job]:
        """The same jobs, with their times and hits."""
        done = list(jobs)
        for job in done:
            self._at(job.arrival, partial(self._arrive, job))
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        self._routing.index.check()
        return done

    def _member(self, number: int) -> _Member:
        engine = SimEngine(
            self._shape.speeds, SimCache(self._shape.l1_pages, self._shape.l2_pages), self._shape.page_size
        )
        loads = EngineLoads(lambda: self.now)
        loads.take(engine.report())
        page_bytes = self._shape.speeds.page_bytes
        return _Member(engine, Target(name=f"engine-{number}", loads=loads, page_bytes=page_bytes))

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), happen))

    def _arrive(self, job: Job) -> None:
        pages = page_hashes(b"".join(job.keys))
        prompt = Prompt(pages=pages, tokens=job.tokens, page_size=self._shape.page_size)
        choice = self._routing.consider(self._targets, prompt)
        member = self._members[choice.chosen]
        member.sent[job] = self._routing.send(member.target, choice, prompt)
        member.engine.submit(job)
        self._go_on(member)

    def _prefilled(self, member: _Member, job: Job) -> None:
        self._at(member.engine.prefilled(job), partial(self._end, member, job))
        member.target.loads.first_token(member.sent[job])
        self._go_on(member)

    def _end(self, member: _Member, job: Job) -> None:
        member.engine.finished()
        member.target.loads.finish(member.sent.pop(job))
        self._go_on(member)

    def _go_on(self, member: _Member) -> None:
        """Something has happened to this engine."""
        if (started := member.engine.start_next(self.now)) is not None:
            job, first_token = started
            self._at(first_token, partial(self._prefilled, member, job))
        if not member.telling:
            member.telling = True
            self._at(self.now + _DELTA_S, partial(self._tell, member))
        if not member.reporting:
            member.reporting = True
            self._at(self.now + _REPORT_S, partial(self._report, member))

    def _tell(self, member: _Member) -> None:
        member.telling = False
        pages = self._routing.index.holder(member.target.name)
        for tier, (added, removed) in member.engine.cache.take_changes().items():
            pages.update(tier, added, removed)

    def _report(self, member: _Member) -> None:
        member.reporting = False
        member.target.loads.take(member.engine.report())


@dataclass(eq=False)
class _Member:
    """An engine and what the router knows of it; whether it will tell of its pages and of its load."""

    engine: SimEngine
    target: Target
    telling: bool = False
    reporting: bool = False

    def __post_init__(self) -> None:
        self.sent: dict[Job, InFlight] = {}
