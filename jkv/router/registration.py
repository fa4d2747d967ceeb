"""An engine's place in its cluster's etcd: a leased record, put back whenever it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from enum import StrEnum

from jkv.router import etcd_ops as ops
from jkv.router import records
from jkv.router.backoff import Backoff
from jkv.router.etcd import Etcd
from jkv.router.etcd_follow import make_history
from jkv.router.etcd_ops import Delete, EtcdError, KeyValue, LeaseLostError, Put
from jkv.router.records import EngineRecord, EngineRefusedError, LeftRecord, RecordError, RefusedRecord

LEASE_S = 10
# A refusal stays visible for so long, and an engine that was refused asks again at half of that.
_REFUSAL_S = 60
_RACES = 20

_log = logging.getLogger(__name__)


class RegistrationState(StrEnum):
    OUT = "out"  # not yet registered, or not any more; being tried
    IN = "in"
    REFUSED = "refused"  # being tried, rarely: the others may go
    REPLACED = "replaced"  # another process has this id now; final


@dataclass(frozen=True, kw_only=True)
class RegistrationStatus:
    state: RegistrationState
    reason: str  # empty while it is in


class EngineReplacedError(EngineRefusedError):
    """Another process has registered under this engine's id."""


class Registration:
    """`join` once, then `run` as a task, `leave` at the end. Nothing here disturbs the engine: it serves on,
    also where etcd is gone.
    """

    def __init__(self, etcd: Etcd, cluster: str, record: EngineRecord, *, lease_s: int = LEASE_S) -> None:
        self._etcd, self._cluster, self._record, self._lease_s = etcd, cluster, record, lease_s
        self._key = records.engine_key(cluster, record.id)
        self._models = records.model_prefix(cluster, record.model)
        self._lease = 0
        self._backoff = Backoff(first=0.2, most=2.0)
        self._changed = asyncio.Event()
        self._was_in = False
        self.status = RegistrationStatus(state=RegistrationState.OUT, reason="not registered yet")

    async def join(self) -> None:
        """Registers, or says why that fails; `run` tries on after an `EtcdError`.

        The first time it takes the place of another process of the same id, as after a restart; later the
        other one has taken this one's place.

        Raises:
            EngineRefusedError: live engines of the same model have other pages.
            EngineReplacedError: another process has this id now.
            EtcdError: etcd cannot be reached or refuses.
        """
        await make_history(self._etcd, records.history_key(self._cluster))
        lease = await self._etcd.grant(self._lease_s)
        try:
            for _ in range(_RACES):
                if await self._try_join(lease):
                    self._lease, self._was_in = lease, True
                    self._set(RegistrationState.IN, "")
                    return
        except Exception:
            with contextlib.suppress(EtcdError):
                await self._etcd.revoke(lease)
            raise
        raise EtcdError(f"{self._key}: lost {_RACES} races against other engines that register")

    def update(self, record: EngineRecord) -> None:
        """Publishes a changed record soon; its id, model and pages are those of before."""
        if (record.id, record.model, record.pages) != (
            self._record.id,
            self._record.model,
            self._record.pages,
        ):
            raise ValueError(f"{record}: another id, model or page layout needs a new process")
        self._record = record
        self._changed.set()

    async def run(self) -> None:
        """Keeps the record alive until cancelled, or until another process takes this engine's id."""
        while True:
            try:
                if not self._lease:
                    await self.join()
                await self._hold()
            except EngineReplacedError as error:
                self._lease = 0
                self._set(RegistrationState.REPLACED, str(error))
                return
            except EngineRefusedError as error:
                self._set(RegistrationState.REFUSED, str(error))
                await asyncio.sleep(_REFUSAL_S / 2)
            except LeaseLostError as error:
                self._lease = 0
                self._set(RegistrationState.OUT, str(error))
                await asyncio.sleep(self._backoff.next())
            except EtcdError as error:
                self._set(RegistrationState.OUT, str(error))
                await asyncio.sleep(self._backoff.next())

    async def leave(self) -> None:
        """Takes the record away, in a way that tells routers that this is meant; best effort. `run` must have
        ended.
        """
        lease, self._lease = self._lease, 0
        if not lease:
            return
        self._set(RegistrationState.OUT, "left")
        with contextlib.suppress(EtcdError, EngineReplacedError):
            own = await self._own_revision()
            left = Put(self._key, records.encode(LeftRecord(id=self._record.id)), lease)
            await self._etcd.txn([ops.modified_at(self._key, own)], [left])
            await self._etcd.revoke(lease)

    async def _hold(self) -> None:
        """Keeps the lease; ends only by an error."""
        while True:
            await self._etcd.keep_alive(self._lease)
            own = await self._own_revision()
            self._backoff.reset()
            if self._changed.is_set():
                self._changed.clear()
                put = Put(self._key, records.encode(self._record), self._lease)
                if not (await self._etcd.txn([ops.modified_at(self._key, own)], [put])).succeeded:
                    self._changed.set()
            self._set(RegistrationState.IN, "")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._lease_s / 3)

    async def _own_revision(self) -> int:
        """Of the record as it is.

        Raises:
            LeaseLostError: it is gone.
            EngineReplacedError: it is another process's.
        """
        kv = await self._etcd.get(self._key)
        if kv is None:
            raise LeaseLostError(f"{self._key}: the record is gone")
        if kv.lease != self._lease:
            self._check_own(kv.value)
        return kv.mod_revision

    async def _try_join(self, lease: int) -> bool:
        """False where another engine was faster, and what to do must be looked at again."""
        pages = self._record.pages
        value = records.encode(pages)
        own_model = f"{self._models}{self._record.id}"
        others, _ = await self._etcd.list(self._models)
        kv = await self._etcd.get(self._key)
        seen = 0 if kv is None else kv.mod_revision
        if kv is not None and self._was_in:
            self._check_own(kv.value)
        for other in others:
            if other.key != own_model and other.value != value:
                await self._refuse(other, kv)
        unchanged = ops.modified_at(self._key, seen)
        if any(other.key == own_model and other.value != value for other in others):
            # Of the process that had this id before.
            await self._etcd.txn([unchanged], [Delete(own_model)])
            return False
        alike = ops.all_equal(self._models, value) if others else ops.absent(self._models)
        there = ops.exists(records.history_key(self._cluster))
        puts = [Put(own_model, value, lease), Put(self._key, records.encode(self._record), lease)]
        return (await self._etcd.txn([there, alike, unchanged], puts)).succeeded

    async def _refuse(self, conflict: KeyValue, own: KeyValue | None) -> None:
        """Leaves a note for people who look for this engine, in the place of its last one, and raises."""
        other = conflict.key.rpartition("/")[2]
        try:
            difference = self._record.pages.difference(records.parse_pages(conflict.value))
        except RecordError as error:
            difference = str(error)
        reason = (
            f"engine {self._record.id} cannot join cluster {self._cluster}: engine {other} serves model "
            f"{self._record.model} with other pages: {difference}; start it with the same model files, "
            "--dtype, --kv-dtype and --page-size, or under another --served-model-name or --cluster"
        )
        note = RefusedRecord(id=self._record.id, address=self._record.address, refused=reason)
        if own is None or _is_refusal(own.value):
            seen = 0 if own is None else own.mod_revision
            lease = await self._etcd.grant(_REFUSAL_S)
            put = Put(self._key, records.encode(note), lease)
            await self._etcd.txn([ops.modified_at(self._key, seen)], [put])
        raise EngineRefusedError(reason)

    def _check_own(self, value: bytes) -> None:
        try:
            record = records.parse_member(value)
        except RecordError:
            return
        if isinstance(record, EngineRecord) and record.incarnation != self._record.incarnation:
            raise EngineReplacedError(
                f"another engine, at {record.address}, has registered as {record.id}: give each its own "
                "--instance-id"
            )

    def _set(self, state: RegistrationState, reason: str) -> None:
        if state != self.status.state:
            log = _log.info if state is RegistrationState.IN else _log.warning
            log("cluster %s: this engine is %s%s", self._cluster, state, reason and f": {reason}")
        self.status = RegistrationStatus(state=state, reason=reason)


def _is_refusal(value: bytes) -> bool:
    try:
        return isinstance(records.parse_member(value), RefusedRecord)
    except RecordError:
        return False
