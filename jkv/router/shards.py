"""The durable record of what stores (L3) hold: written by each owner's engine, read by routers and peers.

It lags behind, and names pages that are gone: whoever reads a page verifies it. What it is for is the time
when the engine itself cannot be asked: a router that starts, or an owner whose engine is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass

from jkv.router import etcd_ops as ops
from jkv.router import records
from jkv.router import shard_records as shards
from jkv.router.backoff import Backoff
from jkv.router.etcd import Etcd
from jkv.router.etcd_follow import make_history
from jkv.router.etcd_ops import Delete, EtcdError, Get, KeyValue, Op, Put, RevisionGoneError
from jkv.router.extents import ExtentMap, ExtentOp, ExtentPut, ExtentStats
from jkv.router.records import EngineRecord, RecordError
from jkv.router.shard_records import ShardRecord

# A record whose owner has not been heard of for so long is deleted; stores remove abandoned owners likewise.
COLLECT_AFTER_S = 7 * 86_400.0
_RENEW_S = 3600.0
# A claim on which nothing is written is looked at this often: etcd may have been emptied.
_LOOK_S = 5.0
_PERIOD_S = 0.5
_QUIET_PERIODS = 4  # without changes, and it is idle
_TXN_OPS = 100
_LOAD_STEP = 1000

_log = logging.getLogger(__name__)


class ShardFencedError(EtcdError):
    """Another engine has claimed this owner; nothing more may be recorded."""


class _ReclaimError(EtcdError):
    """The claim is not in etcd any more."""


class ShardLog:
    """Records what this engine writes to its store and what it evicts.

    `add` and `remove` may be called from any thread and never wait for etcd: they only note what the store
    holds now. So memory is bounded by the store, however long etcd is gone. Before `run`, `add` all pages
    that the store holds; what etcd has recorded beside them is taken away.
    """

    def __init__(self, etcd: Etcd, cluster: str, engine: EngineRecord) -> None:
        if engine.store is None:
            raise ValueError(f"engine {engine.id} has no store")
        self._etcd, self._cluster = etcd, cluster
        self._store = engine.store
        self._record = ShardRecord(
            store=engine.store,
            engine=engine.id,
            incarnation=engine.incarnation,
            model=engine.model,
            model_root=engine.model_root,
            page_size=engine.page_size,
            format_version=engine.format_version,
            epoch=0,
            renewed=0,
        )
        self._key = shards.shard_key(cluster, self._store)
        self._extents = ExtentMap()
        self._lock = threading.Lock()  # of the map
        self._writing = asyncio.Lock()
        self._fence = 0  # the revision of the claim; 0 before
        self._loaded = False
        self._renewed = self._seen = 0.0  # monotonic; `_seen` is when the claim stood at last
        self.trouble = "not claimed yet"  # why nothing is recorded at the moment; empty if it is

    @property
    def stats(self) -> ExtentStats:
        with self._lock:
            return self._extents.stats

    def add(self, keys: Iterable[bytes]) -> None:
        """Pages that were written."""
        with self._lock:
            self._extents.add(keys)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Pages that are gone."""
        with self._lock:
            self._extents.remove(keys)

    async def run(self) -> None:
        """Writes what is due until cancelled, or until another engine claims the owner."""
        backoff = Backoff(first=0.2, most=5.0)
        before, quiet = 0, 0
        while True:
            try:
                async with self._writing:
                    await self._write(idle=quiet >= _QUIET_PERIODS)
                self.trouble = ""
                backoff.reset()
                await asyncio.sleep(_PERIOD_S)
            except ShardFencedError as error:
                self.trouble = str(error)
                _log.error("%s", error)
                return
            except EtcdError as error:
                log = _log.debug if self.trouble else _log.warning
                log("L3 pages are not recorded in etcd at the moment: %s", error)
                self.trouble = str(error)
                await asyncio.sleep(backoff.next())
            now = self._extents.changes
            before, quiet = now, quiet + 1 if now == before else 0

    async def flush(self) -> None:
        """Records everything, for a clean stop.

        Raises:
            ShardFencedError: another engine has the owner.
            EtcdError: etcd cannot be reached.
        """
        async with self._writing:
            await self._write(everything=True)

    async def _write(self, *, everything: bool = False, idle: bool = False) -> None:
        """All that is due, in as many transactions as it needs."""
        while True:
            try:
                if not self._fence:
                    await self._open()
                if not self._loaded:
                    await self._load()
                    await collect_shards(self._etcd, self._cluster)
                if time.monotonic() - self._renewed > _RENEW_S:
                    await self._renew()
                if time.monotonic() - self._seen > _LOOK_S:
                    await self._fenced([])
                await self._write_due(everything, idle)
                return
            except _ReclaimError:
                _log.warning("etcd has lost the record of L3's pages; it is written again")
                self._fence = 0
                with self._lock:
                    self._extents.forget_records()

    async def _write_due(self, everything: bool, idle: bool) -> None:
        while True:
            with self._lock:
                planned = self._extents.plan(_TXN_OPS, everything=everything, idle=idle)
            if not planned:
                return
            await self._fenced([self._op(op) for op in planned])
            with self._lock:
                self._extents.commit(planned)

    async def _fenced(self, operations: list[Op]) -> int:
        """Does them, unless another engine has claimed the owner meanwhile; returns the revision."""
        while True:
            result = await self._etcd.txn(
                [ops.modified_at(self._key, self._fence)], operations, [Get(self._key)]
            )
            if result.succeeded:
                self._seen = time.monotonic()
                return result.revision
            found = result.found[0]
            if not found:
                raise _ReclaimError(f"{self._key}: gone")
            if (claim := self._standing_claim(found[0])) is None:
                raise _ReclaimError(f"{self._key}: claimed by an older engine")
            if (claim.epoch, claim.incarnation) != (self._record.epoch, self._record.incarnation):
                raise self._fenced_by(claim)
            self._fence = found[0].mod_revision  # a renewal whose answer was lost

    async def _open(self) -> None:
        """Claims the owner, the first time against everyone, later only against those that came before."""
        await make_history(self._etcd, records.history_key(self._cluster))
        first = not self._record.epoch
        while not self._fence:
            kv = await self._etcd.get(self._key)
            claim = None if kv is None else self._standing_claim(kv)
            if claim is not None and not first and claim.epoch > self._record.epoch:
                raise self._fenced_by(claim)
            await self._claim(kv, claim, first)

    async def _claim(self, kv: KeyValue | None, claim: ShardRecord | None, first: bool) -> None:
        epoch = self._record.epoch
        if first:
            # Time, so that who claims in an emptied etcd comes after those that it does not know of.
            epoch = max(time.time_ns() // 1_000_000, 0 if claim is None else claim.epoch + 1)
        record = dataclasses.replace(self._record, epoch=epoch, renewed=int(time.time()))
        operations: list[Op] = [Put(self._key, records.encode(record))]
        if not first or claim is None or not claim.same_pages(record):
            operations.append(Delete(shards.extents_prefix(self._cluster, self._store)))
        seen = 0 if kv is None else kv.mod_revision
        result = await self._etcd.txn([ops.modified_at(self._key, seen)], operations)
        if result.succeeded:
            self._record, self._fence, self._renewed = record, result.revision, time.monotonic()

    def _standing_claim(self, kv: KeyValue) -> ShardRecord | None:
        """None for one that does not count: unreadable, or of an engine that claimed before this one."""
        try:
            claim = shards.parse_shard(kv.value)
        except RecordError as error:
            _log.warning("%s: %s", kv.key, error)
            return None
        return claim if not self._record.epoch or claim.epoch >= self._record.epoch else None

    def _fenced_by(self, claim: ShardRecord) -> ShardFencedError:
        return ShardFencedError(
            f"engine {claim.engine} has claimed L3 owner {self._store.owner} of {self._store.url}: this "
            "engine records nothing there any more"
        )

    async def _load(self) -> None:
        prefix = shards.extents_prefix(self._cluster, self._store)
        with self._lock:
            self._extents.begin_load()
        async for page, _ in self._etcd.pages(prefix):
            for start in range(0, len(page), 16):
                recorded = [_recorded(kv) for kv in page[start : start + 16]]
                with self._lock:
                    self._extents.load(one for one in recorded if one is not None)
                await asyncio.sleep(0)
        placed = False
        while not placed:
            with self._lock:
                placed = self._extents.finish_load(_LOAD_STEP)
            await asyncio.sleep(0)
        self._loaded = True

    async def _renew(self) -> None:
        record = dataclasses.replace(self._record, renewed=int(time.time()))
        self._fence = await self._fenced([Put(self._key, records.encode(record))])
        self._record, self._renewed = record, time.monotonic()
        await collect_shards(self._etcd, self._cluster)

    def _op(self, op: ExtentOp) -> Op:
        key = shards.extent_key(self._cluster, self._store, op.number)
        return Put(key, shards.encode_extent(op.keys)) if isinstance(op, ExtentPut) else Delete(key)


@dataclass(frozen=True, kw_only=True)
class ShardPages:
    """Keys of pages of one shard, of 16 bytes each, back to back, in the order in which they were written."""

    shard: ShardRecord
    keys: bytes


async def read_shards(etcd: Etcd, cluster: str) -> AsyncGenerator[ShardPages]:
    """Everything that is recorded, in pieces of up to 64,000 keys; a shard without pages comes with no keys.
    A key may come more than once.

    Raises:
        EtcdError: etcd cannot be reached.
    """
    found, _ = await etcd.list(shards.shards_prefix(cluster))
    for kv in found:
        try:
            shard = shards.parse_shard(kv.value)
        except RecordError as error:
            _log.warning("%s: %s", kv.key, error)
            continue
        async with contextlib.aclosing(_read_extents(etcd, cluster, shard)) as pieces:
            async for keys in pieces:
                yield ShardPages(shard=shard, keys=keys)


async def _read_extents(etcd: Etcd, cluster: str, shard: ShardRecord) -> AsyncGenerator[bytes]:
    while True:
        try:
            async for page, _ in etcd.pages(shards.extents_prefix(cluster, shard.store)):
                yield b"".join(_keys(kv) for kv in page)
            return
        except RevisionGoneError:  # compacted during a long listing
            await asyncio.sleep(0.1)


async def collect_shards(etcd: Etcd, cluster: str, *, after_s: float = COLLECT_AFTER_S) -> list[ShardRecord]:
    """Deletes the records of owners that were not heard of for `after_s`; returns them.

    Raises:
        EtcdError: etcd cannot be reached.
    """
    collected = []
    found, _ = await etcd.list(shards.shards_prefix(cluster))
    for kv in found:
        try:
            shard = shards.parse_shard(kv.value)
        except RecordError:
            continue
        if time.time() - shard.renewed < after_s:
            continue
        operations = [Delete(kv.key), Delete(shards.extents_prefix(cluster, shard.store))]
        if (await etcd.txn([ops.modified_at(kv.key, kv.mod_revision)], operations)).succeeded:
            _log.info(
                "L3 owner %s of %s is abandoned: not offered any more", shard.store.owner, shard.store.url
            )
            collected.append(shard)
    return collected


def _recorded(kv: KeyValue) -> tuple[int, list[bytes]] | None:
    try:
        return shards.extent_number(kv.key), shards.split_keys(shards.extent_keys(kv.value))
    except RecordError as error:
        _log.warning("%s: %s", kv.key, error)
        return None


def _keys(kv: KeyValue) -> bytes:
    try:
        return shards.extent_keys(kv.value)
    except RecordError as error:
        _log.warning("%s: %s", kv.key, error)
        return b""
