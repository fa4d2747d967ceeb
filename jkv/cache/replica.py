"""What an engine shows of itself to routers and peers. No jax, no I/O."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jkv.cache.pages import Tier
from jkv.cache.peers import PeerClient


@dataclass(frozen=True, kw_only=True)
class ReplicaLoad:
    """How busy an engine is; speeds are 0 before the first measurement."""

    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0  # submitted and not computed yet
    max_num_seqs: int = 0
    prefill_tokens_per_s: float = 0.0
    l2_bytes_per_s: float = 0.0
    l3_bytes_per_s: float = 0.0
    draining: bool = False


@dataclass(frozen=True, kw_only=True)
class ReplicaDescription:
    """What stays as it is for as long as an engine's process lives."""

    id: str
    model: str
    model_root: bytes
    page_size: int  # tokens
    page_bytes: int
    tiers: tuple[Tier, ...]


@dataclass(frozen=True, kw_only=True)
class StorePlace:
    """Where L3 is: engines that found the same token there see the same store."""

    url: str
    token: str
    owner: str


@dataclass(frozen=True, kw_only=True)
class ReplicaEvent:
    """A part of the stream that a follower gets: with `reset`, `added` is all that there is.

    `number` is that of the last change contained. Keys are of 16 bytes.
    """

    incarnation: str
    number: int
    reset: bool = False
    added: Mapping[Tier, Sequence[bytes]] = field(default_factory=dict)
    removed: Mapping[Tier, Sequence[bytes]] = field(default_factory=dict)
    load: ReplicaLoad


@dataclass(frozen=True, kw_only=True)
class TierDigest:
    """How many pages a tier has, and the exclusive or of the first 8 bytes of their keys, little-endian."""

    pages: int
    checksum: int


@dataclass(frozen=True, kw_only=True)
class Digest:
    """What an engine holds as of change `number`."""

    incarnation: str
    number: int
    tiers: Mapping[Tier, TierDigest]


class Replica(Protocol):
    """One engine, as others follow it."""

    @property
    def incarnation(self) -> str:
        """Another one in every process."""
        ...

    @property
    def description(self) -> ReplicaDescription: ...

    @property
    def kv_dtype(self) -> str: ...

    @property
    def store(self) -> StorePlace | None:
        """None without L3."""
        ...

    def follow_own(
        self, add: Callable[[Iterable[bytes]], None], remove: Callable[[Iterable[bytes]], None]
    ) -> None:
        """Has `add` called with all pages that this engine has in L3, then both as they come and go. They are
        called on the engine's thread.
        """
        ...

    def use_peers(self, client: PeerClient, trusts: Callable[[str], bool]) -> None:
        """Lets the engine fetch pages from the addresses that `trusts` accepts."""
        ...

    def watch(self, incarnation: str, after: int) -> AsyncGenerator[ReplicaEvent, None]:
        """A snapshot, or what came after that change of that incarnation, then every change and load, and a
        sign of life every half a second.
        """
        ...

    def fetch(self, model_root: bytes, keys: Sequence[bytes]) -> AsyncGenerator[bytes, None]:
        """Page objects, as L3 has them, of consecutive pages up to the first that is not here.

        Raises:
            FailedPreconditionError: another model's pages are asked for.
        """
        ...

    async def digest(self) -> Digest: ...


def digest_of(keys: Sequence[bytes]) -> TierDigest:
    checksum = 0
    for key in keys:
        checksum ^= int.from_bytes(key[:8], "little")
    return TierDigest(pages=len(keys), checksum=checksum)
