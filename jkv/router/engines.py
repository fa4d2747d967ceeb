"""One engine, as a router knows it: who it is, whether it can be used, and what was sent to it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import grpc

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.api.listening import MAX_MESSAGE_BYTES
from jkv.cache.breaker import Breaker, BreakerState
from jkv.router.load import EngineLoads, InFlight

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # An engine that comes back is tried again soon.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.min_reconnect_backoff_ms", 5000),
    # Ends connections to machines that are gone. Engines take pings, as their events come more often.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)
# Of the stream of events alone, which so does not wait for answers that nobody reads.
_OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
_HOLDERS = itertools.count()


class EngineState(StrEnum):
    SERVING = "serving"
    CONNECTING = "connecting"  # there is no view of it yet, or no more
    SUSPECT = "suspect"  # silent
    FAILING = "failing"  # requests to it failed in a row
    DRAINING = "draining"


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """What came of asking an engine for a prompt twice: `pending`, `passed`, or `failed: ` and why.

    The tokens are those that the index had of it the second time, and those that the engine had cached.
    """

    verdict: str = "pending"
    predicted_tokens: int = 0
    cached_tokens: int = 0


@dataclass(eq=False)
class Sent:
    """A request that an engine has. `moved` says that the router took it away, to send it elsewhere."""

    engine: Engine
    peer: pb.Peer | None = None  # who has more of its prompt
    in_flight: InFlight | None = None  # in the engine's expected load, where it is a Generate
    cancel: Callable[[], Any] = lambda: None
    moved: bool = False


@dataclass(eq=False)
class Engine:
    """Owner: the event loop. Times are in `time.monotonic()` seconds.

    `number` is that of the last change in the index; `synced` says that the index has all before it.
    `silence` is how long an engine may be silent before it is suspect.
    """

    address: str
    name: str  # in the set of engines: its id in etcd, or its address
    silence: float
    description: pb.EngineDescription | None = None
    incarnation: str = ""
    number: int = 0
    load: pb.EngineLoad = field(default_factory=pb.EngineLoad)
    synced: bool = False
    refused: str = ""
    failure: str = "not connected yet"
    heard: float = field(default_factory=time.monotonic)
    full_until: float = 0.0
    self_test: SelfTest = SelfTest()
    # Its name in the index: a new one for an engine that comes back while this one still leaves.
    holder: str = field(default_factory=lambda: f"holder-{next(_HOLDERS)}")
    sent: set[Sent] = field(default_factory=set)
    failures: Counter[str] = field(default_factory=Counter)  # of requests that it had, by kind

    def __post_init__(self) -> None:
        self.breaker = Breaker(time.monotonic)
        self.loads = EngineLoads(time.monotonic)
        self._channel = grpc.aio.insecure_channel(self.address, options=_OPTIONS)
        self._watch_channel = grpc.aio.insecure_channel(self.address, options=(*_OPTIONS, *_OWN_CONNECTION))
        # The generated stubs have no types.
        self.generation: Any = pb_grpc.GenerationStub(self._channel)
        self.replica: Any = pb_grpc.ReplicaStub(self._watch_channel)

    @property
    def id(self) -> str:
        return self.name if self.description is None else self.description.id

    @property
    def model(self) -> str:
        return "" if self.description is None else self.description.model

    @property
    def lag_s(self) -> float:
        """Seconds since the last event of its stream."""
        return time.monotonic() - self.heard

    @property
    def state(self) -> EngineState:
        if not self.synced:
            return EngineState.CONNECTING
        if self.lag_s > self.silence:
            return EngineState.SUSPECT
        if self.load.draining:
            return EngineState.DRAINING
        if self.breaker.state is not BreakerState.CLOSED:
            return EngineState.FAILING
        return EngineState.SERVING

    @property
    def trouble(self) -> str:
        """Why it is not used, for people."""
        state = self.state
        if state is EngineState.CONNECTING:
            return f"{self.id} at {self.address} is connecting ({self.failure})"
        if state is EngineState.SUSPECT:
            return f"{self.id} has been silent for {self.lag_s:.1f} s"
        return f"{self.id} is {state}"

    def started(self) -> None:
        """It is another process now, which has not failed yet."""
        self.self_test, self.breaker, self.full_until = SelfTest(), Breaker(time.monotonic), 0.0

    def disconnected(self, why: str) -> None:
        """Its stream of events has ended."""
        self.synced, self.failure = False, why

    async def close(self) -> None:
        for channel in (self._channel, self._watch_channel):
            await channel.close(None)


async def settle(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
