"""How many L3 shards each engine writes, as etcd has it: for people."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter

from jkv.router import records
from jkv.router import shard_records as shards
from jkv.router.etcd import Etcd
from jkv.router.etcd_follow import Changed, Frozen, Listed, follow
from jkv.router.etcd_ops import KeyValue
from jkv.router.records import RecordError

log = logging.getLogger(__name__)


class ShardCounts:
    """By the engine's id. While etcd cannot be followed, the last ones stay."""

    def __init__(self, etcd: Etcd, cluster: str) -> None:
        self._etcd, self._cluster = etcd, cluster
        self._writers: dict[str, str] = {}  # by the shard's key

    def of(self, engine: str) -> int:
        return Counter(self._writers.values())[engine]

    async def run(self) -> None:
        """Follow etcd until cancelled."""
        prefix, history = shards.shards_prefix(self._cluster), records.history_key(self._cluster)
        async with contextlib.aclosing(follow(self._etcd, prefix, history)) as steps:
            async for step in steps:
                match step:
                    case Listed(found):
                        self._writers = {}
                        for kv in found:
                            self._put(kv)
                    case Changed(events):
                        for event in events:
                            self._writers.pop(event.kv.key, None)
                            if not event.deleted:
                                self._put(event.kv)
                    case Frozen():
                        pass  # membership says it

    def _put(self, kv: KeyValue) -> None:
        try:
            self._writers[kv.key] = shards.parse_shard(kv.value).engine
        except RecordError as error:
            log.warning("%s: %s", kv.key, error)
