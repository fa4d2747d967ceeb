"""The Replica service: what routers and peers see of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from importlib.metadata import version

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.api.serving import Context, Serving, answering
from jkv.cache.keys import KEY_BYTES
from jkv.cache.pages import Tier
from jkv.cache.replica import ReplicaDescription, ReplicaEvent
from jkv.errors import InvalidRequestError

# A router takes so many keys into its index in two milliseconds, and decides nothing meanwhile.
_KEYS_PER_EVENT = 2**11


class ReplicaServicer(pb_grpc.ReplicaServicer):
    """Answers UNAVAILABLE while `serving` has no model."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    @answering
    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:
        replica = self._serving.backend().replica
        engine: pb.EngineDescription | None = _description(replica.description)
        async with aclosing(replica.watch(request.incarnation, request.after)) as events:
            async for event in events:
                for message in watch_events(event):
                    if engine is not None:
                        message.engine.CopyFrom(engine)
                        engine = None
                    await context.write(message)

    @answering
    async def FetchPages(self, request: pb.FetchPagesRequest, context: Context) -> None:
        if not request.keys or len(request.keys) % KEY_BYTES:
            raise InvalidRequestError(
                "keys", f"must be one or more keys of {KEY_BYTES} bytes, got {len(request.keys)} bytes"
            )
        replica = self._serving.backend().replica
        async with aclosing(replica.fetch(request.model_root, split_keys(request.keys))) as pages:
            async for page in pages:
                await context.write(pb.PageData(object=page))

    @answering
    async def Digest(self, request: pb.DigestRequest, context: Context) -> pb.DigestResponse:
        digest = await self._serving.backend().replica.digest()
        tiers = [
            pb.TierDigest(tier=tier.value, pages=one.pages, checksum=one.checksum)
            for tier, one in digest.tiers.items()
        ]
        return pb.DigestResponse(incarnation=digest.incarnation, number=digest.number, tiers=tiers)


def _description(replica: ReplicaDescription) -> pb.EngineDescription:
    fields = {**asdict(replica), "tiers": [tier.value for tier in replica.tiers]}
    return pb.EngineDescription(**fields, version=version("jkv"))


def split_keys(keys: bytes) -> list[bytes]:
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]


def watch_events(event: ReplicaEvent) -> Iterator[pb.WatchEvent]:
    """An event as messages: one, or several where a snapshot is large."""
    parts = [
        *_changes(event.removed, lambda tier, keys: pb.PageChange(tier=tier, removed=keys)),
        *_changes(event.added, lambda tier, keys: pb.PageChange(tier=tier, added=keys)),
    ]
    load = pb.EngineLoad(**asdict(event.load))
    for number, part in enumerate(parts or [None]):
        yield pb.WatchEvent(
            incarnation=event.incarnation,
            number=event.number,
            reset=event.reset and number == 0,
            partial=number < len(parts) - 1,
            changes=[] if part is None else [part],
            load=load,
        )


def _changes(
    keys_by_tier: Mapping[Tier, Sequence[bytes]], make: Callable[[str, bytes], pb.PageChange]
) -> Iterator[pb.PageChange]:
    for tier, keys in keys_by_tier.items():
        for start in range(0, len(keys), _KEYS_PER_EVENT):
            yield make(tier.value, b"".join(keys[start : start + _KEYS_PER_EVENT]))
