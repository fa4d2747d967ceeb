"""A prefix of etcd, followed for as long as a process lives, whatever etcd does meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from jkv.router import etcd_ops as ops
from jkv.router.backoff import Backoff
from jkv.router.etcd import Etcd
from jkv.router.etcd_ops import EtcdError, Event, KeyValue, Put, RevisionGoneError


@dataclass(frozen=True, slots=True)
class Listed:
    """All that there is, at the start and whenever changes may have been missed."""

    found: tuple[KeyValue, ...]


@dataclass(frozen=True, slots=True)
class Changed:
    """What has changed since, in order; empty where the connection is back."""

    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Frozen:
    """etcd cannot be followed at the moment. It is tried again and again."""

    reason: str


Step = Listed | Changed | Frozen


async def make_history(etcd: Etcd, key: str) -> None:
    """Gives the store a mark, unless it has one, by which `follow` notices that it was emptied.

    Raises:
        EtcdError: it cannot be written.
    """
    await etcd.txn([ops.absent(key)], [Put(key, uuid.uuid4().hex.encode())])


async def follow(etcd: Etcd, prefix: str, history: str) -> AsyncGenerator[Step]:
    """Never ends by itself. `history` is the key of the store's mark."""
    backoff = Backoff(first=0.1, most=2.0)
    mark: KeyValue | None = None
    revision = 0  # up to which all is known; 0 for nothing
    while True:
        try:
            if not revision:
                mark = await etcd.get(history)
                found, revision = await etcd.list(prefix)
                yield Listed(tuple(found))
            async with contextlib.aclosing(etcd.watch(prefix, revision)) as batches:
                async for batch in batches:
                    if not batch.events and await etcd.get(history) != mark:
                        raise RevisionGoneError(f"{prefix}: the store was emptied")
                    backoff.reset()
                    revision = max(revision, batch.revision) if batch.events else revision
                    yield Changed(batch.events)
        except RevisionGoneError:
            revision = 0
            await asyncio.sleep(backoff.next())
        except EtcdError as error:
            yield Frozen(str(error))
            await asyncio.sleep(backoff.next())
