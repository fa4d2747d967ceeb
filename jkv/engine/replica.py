"""The engine as routers and peers follow it: what changes in its tiers, its load, and its pages."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from jkv.cache.events import ChangeLog, Changes
from jkv.cache.l3.format import StoreIdentity, encode
from jkv.cache.pages import PageInfo, Tier
from jkv.cache.peer_tier import PeerTier
from jkv.cache.peers import PeerClient
from jkv.cache.replica import Digest, ReplicaDescription, ReplicaEvent, ReplicaLoad, TierDigest, digest_of
from jkv.engine.calls import ask
from jkv.engine.loop import EngineLoop
from jkv.engine.runner import Runner
from jkv.errors import FailedPreconditionError

# A follower that is this far behind gets a snapshot instead of what it missed.
_MAX_BACKLOG = 1000
# Pages of a fetch that are copied out of L1 at a time: a moment's work between two steps.
_FETCH_BATCH = 16
_POLL_S = 0.05
_LOAD_EVERY_S = 0.05
_SIGN_OF_LIFE_S = 0.5

Item = Changes | ReplicaLoad


class _Follower:
    """The queue of one stream. `put` is called by the engine's thread, the rest by the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.behind = False  # and stays so: it has missed something
        self._loop = loop
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        self._put = self._got = 0  # each counted by one thread only

    def put(self, item: Item) -> None:
        self.behind = self.behind or self._put - self._got >= _MAX_BACKLOG
        if self.behind:
            return
        self._put += 1
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:
            self.behind = True  # its event loop is gone

    async def get(self) -> Item | None:
        """The next item, or None after a while without one."""
        try:
            item = await asyncio.wait_for(self._items.get(), _POLL_S)
        except TimeoutError:
            return None
        self._got += 1
        return item


class EngineReplica:
    """Implements `jkv.cache.replica.Replica`. Safe to use from several event loops."""

    def __init__(
        self,
        loop: EngineLoop,
        changes: ChangeLog,
        runner: Runner,
        identity: StoreIdentity,
        *,
        instance_id: str,
        model: str,
    ) -> None:
        self.incarnation = uuid.uuid4().hex
        self.description = ReplicaDescription(
            id=instance_id,
            model=model,
            model_root=identity.model_root,
            page_size=identity.page_size,
            page_bytes=identity.page_bytes,
            tiers=loop.scheduler.lower.tiers,
        )
        disk = loop.scheduler.lower.disk
        self.kv_dtype, self.store = identity.kv_dtype, None if disk is None else disk.place
        self._loop, self._changes, self._runner, self._identity = loop, changes, runner, identity
        # Both belong to the engine's thread.
        self._followers: list[_Follower] = []
        self._load, self._load_sent = ReplicaLoad(), 0.0
        loop.after_turn = self._publish

    @property
    def page_bytes(self) -> int:
        return self._identity.page_bytes

    def follow_own(
        self, add: Callable[[Iterable[bytes]], None], remove: Callable[[Iterable[bytes]], None]
    ) -> None:
        """See `Replica.follow_own`."""
        disk = self._loop.scheduler.lower.disk

        def follow(future: Future[None]) -> None:
            if disk is not None:
                add([page.key for page in disk.own_pages()])
                disk.on_own = lambda key, there: (add if there else remove)([key])
            future.set_result(None)

        self._loop.call(follow)

    def use_peers(self, client: PeerClient, trusts: Callable[[str], bool]) -> None:
        """See `Replica.use_peers`."""
        lower = self._loop.scheduler.lower
        peers = PeerTier(client, self._identity, self._runner, self._loop.post, time.monotonic, trusts)

        def use(future: Future[None]) -> None:
            lower.peers = None if lower.off else peers  # fetched pages land in L2
            future.set_result(None)

        self._loop.call(use)

    async def watch(self, incarnation: str, after: int) -> AsyncGenerator[ReplicaEvent, None]:
        """See `Replica.watch`."""
        follower: _Follower | None = None
        known = after if incarnation == self.incarnation else None
        number, load, sent = 0, ReplicaLoad(), 0.0
        try:
            while self._loop.running:
                if follower is None or follower.behind:
                    await self._leave(follower)
                    follower = _Follower(asyncio.get_running_loop())
                    for event in await ask(self._loop, partial(self._join, follower, known)):
                        number, load = event.number, event.load
                        yield event
                    known = None
                item = await follower.get()
                if item is None and time.monotonic() - sent < _SIGN_OF_LIFE_S:
                    continue
                sent = time.monotonic()
                if isinstance(item, Changes):
                    number = item.number
                    yield self._event(number, load, added=item.added, removed=item.removed)
                else:
                    load = item or load
                    yield self._event(number, load)
        finally:
            await self._leave(follower)

    async def fetch(self, model_root: bytes, keys: Sequence[bytes]) -> AsyncGenerator[bytes, None]:
        """See `Replica.fetch`."""
        if model_root != self._identity.model_root:
            raise FailedPreconditionError(
                f"this engine has model root {self._identity.model_root.hex()}, not {model_root.hex()}"
            )
        for start in range(0, len(keys), _FETCH_BATCH):
            batch = keys[start : start + _FETCH_BATCH]
            found = await ask(self._loop, partial(self._find, batch))
            for info, payload in found:
                yield await asyncio.to_thread(self._encode, info, payload)
            if len(found) < len(batch):
                return

    async def digest(self) -> Digest:
        """See `Replica.digest`."""
        return await ask(self._loop, self._digest)

    def _publish(self) -> None:
        """On the engine's thread, after each turn: tells the followers what has changed."""
        changes = self._changes.take()
        if not self._followers:
            return  # most engines stand alone: measuring for nobody would cost every step
        load, now = self._measure(), time.monotonic()
        news: list[Item] = [changes] if changes is not None else []
        rests = not load.running and not load.waiting
        if load != self._load and (rests or now - self._load_sent >= _LOAD_EVERY_S):
            self._load, self._load_sent = load, now
            news.append(load)
        for item in news:
            for follower in self._followers:
                follower.put(item)

    def _join(self, follower: _Follower, after: int | None) -> list[ReplicaEvent]:
        self._publish()
        if not self._followers:
            self._load = self._measure()
        missed = None if after is None else self._changes.since(after)
        self._followers.append(follower)
        if missed is None:
            added = {tier: keys for tier, keys in self._held().items() if keys}
            return [self._event(self._changes.number, self._load, reset=True, added=added)]
        if not missed:
            return [self._event(self._changes.number, self._load)]
        return [self._event(c.number, self._load, added=c.added, removed=c.removed) for c in missed]

    async def _leave(self, follower: _Follower | None) -> None:
        if follower is None:
            return

        def leave() -> None:
            if follower in self._followers:
                self._followers.remove(follower)

        self._loop.call(lambda future: future.set_result(leave()))

    def _held(self) -> dict[Tier, list[bytes]]:
        lower = self._loop.scheduler.lower
        held = {Tier.L1: [page.info.key for page in self._loop.scheduler.pool.held()]}
        if lower.host.keep:
            held[Tier.L2] = [page.info.key for page in lower.host.pages() if page.payload is not None]
        if lower.disk is not None:
            held[Tier.L3] = lower.disk.readable()
        return held

    def _digest(self) -> Digest:
        self._publish()
        tiers: dict[Tier, TierDigest] = {tier: digest_of(keys) for tier, keys in self._held().items()}
        return Digest(incarnation=self.incarnation, number=self._changes.number, tiers=tiers)

    def _measure(self) -> ReplicaLoad:
        scheduler = self._loop.scheduler
        gate, lower = scheduler.lower.gate, scheduler.lower
        return ReplicaLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            prefill_tokens=sum(s.to_compute for s in (*scheduler.running, *scheduler.waiting)),
            max_num_seqs=scheduler.limits.max_num_seqs,
            prefill_tokens_per_s=gate.prefill_tokens_per_s,
            l2_bytes_per_s=gate.load_pages_per_s(Tier.L2) * self._identity.page_bytes,
            l3_bytes_per_s=lower.read_speed.per_s,
            draining=not self._loop.open,
        )

    def _find(self, keys: Sequence[bytes]) -> list[tuple[PageInfo, Any]]:
        """The first of these pages that are in L1 or L2, with their copies in host memory."""
        pool, host = self._loop.scheduler.pool, self._loop.scheduler.lower.host
        found: list[tuple[PageInfo, Any]] = []
        for key in keys:
            page = host.tree.get(key)
            if page is not None and page.payload is not None:
                found.append((page.info, page.payload))
            elif (cached := pool.get(key)) is not None:
                number, info = cached
                found.append((info, self._runner.save([number])[0]))
            else:
                break
        return found

    def _encode(self, info: PageInfo, payload: Any) -> bytes:
        return encode(self._identity, info, self._runner.page_to_bytes(payload))

    def _event(self, number: int, load: ReplicaLoad, **fields: Any) -> ReplicaEvent:
        return ReplicaEvent(incarnation=self.incarnation, number=number, load=load, **fields)
