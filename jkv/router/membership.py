"""The engines of a cluster, as etcd or a flag says: the router's side."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from jkv.router import records
from jkv.router.etcd import Etcd
from jkv.router.etcd_follow import Changed, Frozen, Listed, Step, follow
from jkv.router.etcd_ops import KeyValue
from jkv.router.records import EngineRecord, LeftRecord, RecordError, RefusedRecord

# How long an engine whose record vanished stays a member: longer than an engine takes to register again after
# etcd was frozen or emptied. Whether it answers is not told from here.
GRACE_S = 15.0

_log = logging.getLogger(__name__)


class ChangeKind(StrEnum):
    JOINED = "joined"
    LEFT = "left"
    REPLACED = "replaced"  # the same id, another process
    UPDATED = "updated"  # the same process, another record


@dataclass(frozen=True, kw_only=True)
class Member:
    """An engine; `record` is None where only its address is known."""

    id: str
    address: str
    record: EngineRecord | None = None


@dataclass(frozen=True, kw_only=True)
class MemberChange:
    kind: ChangeKind
    member: Member  # as it is now, or was at last


@dataclass(frozen=True, kw_only=True)
class MembershipState:
    """Whether the view is current. While it is frozen nobody leaves and nobody joins."""

    current: bool
    reason: str  # why not; empty where it is current
    since: float  # time.monotonic()


Listener = Callable[[MemberChange], None]


class Membership(Protocol):
    """Who is in the cluster. Everything happens on the event loop."""

    @property
    def members(self) -> Mapping[str, Member]:
        """By id."""
        ...

    @property
    def refused(self) -> Mapping[str, RefusedRecord]:
        """Engines that may not join, by id, with the reason."""
        ...

    @property
    def state(self) -> MembershipState: ...

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` with every member as joined, then with every change, until what it returns is
        called. Listeners must not raise.
        """
        ...

    async def run(self) -> None:
        """Follows the cluster until cancelled."""
        ...


class _Listeners:
    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def add(self, listener: Listener, members: Iterable[Member]) -> Callable[[], None]:
        for member in members:
            listener(MemberChange(kind=ChangeKind.JOINED, member=member))
        self._listeners.append(listener)

        def remove() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return remove

    def tell(self, kind: ChangeKind, member: Member) -> None:
        _log.info("engine %s at %s: %s", member.id, member.address, kind)
        for listener in tuple(self._listeners):
            listener(MemberChange(kind=kind, member=member))


class StaticMembers:
    """A fixed set, of `--engines`; an engine's id is its address."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self.members: Mapping[str, Member] = MappingProxyType(
            {address: Member(id=address, address=address) for address in addresses}
        )
        self.refused: Mapping[str, RefusedRecord] = MappingProxyType({})
        self.state = MembershipState(current=True, reason="", since=time.monotonic())
        self._listeners = _Listeners()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        return self._listeners.add(listener, self.members.values())

    async def run(self) -> None:
        await asyncio.Event().wait()


class Members:
    """The engines registered in etcd.

    A record that vanishes without its engine having said so is believed only after `grace_s` of a running
    etcd: leases also run out because etcd was frozen, and an emptied etcd has none.
    """

    def __init__(self, etcd: Etcd, cluster: str, *, grace_s: float = GRACE_S) -> None:
        self._etcd, self._cluster, self._grace_s = etcd, cluster, grace_s
        self._members: dict[str, Member] = {}
        self._refused: dict[str, RefusedRecord] = {}
        self._vanished: dict[str, asyncio.TimerHandle | None] = {}  # None while etcd cannot be followed
        self._listeners = _Listeners()
        self.state = MembershipState(current=False, reason="not read yet", since=time.monotonic())

    @property
    def members(self) -> Mapping[str, Member]:
        return MappingProxyType(self._members)

    @property
    def refused(self) -> Mapping[str, RefusedRecord]:
        return MappingProxyType(self._refused)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        return self._listeners.add(listener, self._members.values())

    async def run(self) -> None:
        prefix, history = records.engines_prefix(self._cluster), records.history_key(self._cluster)
        try:
            async with contextlib.aclosing(follow(self._etcd, prefix, history)) as steps:
                async for step in steps:
                    self._apply(step)
        finally:
            self._freeze("the router has ended following etcd")

    def _apply(self, step: Step) -> None:
        if isinstance(step, Frozen):
            self._freeze(step.reason)
            return
        if isinstance(step, Listed):
            self._refused.clear()
            listed = {_id(kv) for kv in step.found}
            for kv in step.found:
                self._put(kv)
            for engine in self._members.keys() - listed:
                self._vanished.setdefault(engine, None)
        else:
            self._change(step)
        self._thaw()

    def _change(self, step: Changed) -> None:
        for event in step.events:
            if not event.deleted:
                self._put(event.kv)
                continue
            engine = _id(event.kv)
            self._refused.pop(engine, None)
            if engine in self._members:
                self._vanished.setdefault(engine, None)

    def _put(self, kv: KeyValue) -> None:
        engine = _id(kv)
        try:
            record = records.parse_member(kv.value)
        except RecordError as error:
            record = RefusedRecord(id=engine, address="", refused=str(error))
        self._refused.pop(engine, None)
        if isinstance(record, EngineRecord):
            self._keep(engine, record)
        elif isinstance(record, LeftRecord):
            self._remove(engine)
        else:
            self._refused[engine] = record
            _log.warning("engine %s: %s", engine, record.refused)

    def _keep(self, engine: str, record: EngineRecord) -> None:
        timer = self._vanished.pop(engine, None)
        if timer is not None:
            timer.cancel()
        old = self._members.get(engine)
        member = Member(id=engine, address=record.address, record=record)
        if member == old:
            return
        self._members[engine] = member
        if old is None or old.record is None:
            kind = ChangeKind.JOINED
        elif old.record.incarnation != record.incarnation:
            kind = ChangeKind.REPLACED
        else:
            kind = ChangeKind.UPDATED
        self._listeners.tell(kind, member)

    def _remove(self, engine: str) -> None:
        timer = self._vanished.pop(engine, None)
        if timer is not None:
            timer.cancel()
        member = self._members.pop(engine, None)
        if member is not None:
            self._listeners.tell(ChangeKind.LEFT, member)

    def _freeze(self, reason: str) -> None:
        for engine, timer in self._vanished.items():
            if timer is not None:
                timer.cancel()
            self._vanished[engine] = None
        if self.state.current or self.state.reason != reason:
            _log.log(
                logging.WARNING if self.state.current else logging.DEBUG, "members are frozen: %s", reason
            )
            since = time.monotonic() if self.state.current else self.state.since
            self.state = MembershipState(current=False, reason=reason, since=since)

    def _thaw(self) -> None:
        loop = asyncio.get_running_loop()
        for engine, timer in self._vanished.items():
            if timer is None:
                self._vanished[engine] = loop.call_later(self._grace_s, self._remove, engine)
        if not self.state.current:
            self.state = MembershipState(current=True, reason="", since=time.monotonic())
            _log.info("members are current: %s", ", ".join(sorted(self._members)) or "none yet")


def _id(kv: KeyValue) -> str:
    return kv.key.rpartition("/")[2]
