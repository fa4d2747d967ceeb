"""What etcd has of the pages in stores (L3): who owns them, and their keys in extents. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from jkv.cache.keys import KEY_BYTES
from jkv.router.records import RecordError, StoreRef, number, parse_object, parse_store, text

# The first byte of an extent's value.
_EXTENT_VERSION = b"\x01"


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """The pages of one owner in one store, and the engine that writes them.

    Of two engines that claim an owner the one with the higher epoch has it. `renewed` is when the owner last
    said that it is there, in seconds since 1970.
    """

    store: StoreRef
    engine: str
    incarnation: str
    model: str
    model_root: bytes
    page_size: int
    format_version: int
    epoch: int
    renewed: int

    def same_pages(self, other: ShardRecord) -> bool:
        """Whether keys of the one mean the same pages as those of the other."""
        return (self.model_root, self.page_size, self.format_version) == (
            other.model_root,
            other.page_size,
            other.format_version,
        )


def shards_prefix(cluster: str) -> str:
    return f"/jkv/{cluster}/shards/"


def shard_key(cluster: str, store: StoreRef) -> str:
    return f"{shards_prefix(cluster)}{store.token}/{store.owner}"


def extents_prefix(cluster: str, store: StoreRef) -> str:
    return f"/jkv/{cluster}/extents/{store.token}/{store.owner}/"


def extent_key(cluster: str, store: StoreRef, extent: int) -> str:
    return f"{extents_prefix(cluster, store)}{extent:012x}"


def extent_number(key: str) -> int:
    """
    Raises:
        RecordError: not the key of an extent.
    """
    try:
        return int(key.rpartition("/")[2], 16)
    except ValueError:
        raise RecordError(f"{key}: not the number of an extent") from None


def encode_extent(keys: tuple[bytes, ...]) -> bytes:
    return _EXTENT_VERSION + b"".join(keys)


def extent_keys(value: bytes) -> bytes:
    """The keys, back to back.

    Raises:
        RecordError: not an extent of this version.
    """
    if value[:1] != _EXTENT_VERSION or len(value) % KEY_BYTES != 1:
        raise RecordError(f"an extent of {len(value)} bytes, version {value[:1].hex()}, cannot be read")
    return value[1:]


def split_keys(keys: bytes) -> list[bytes]:
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]


def parse_shard(value: bytes) -> ShardRecord:
    """
    Raises:
        RecordError: not such a record; says what is wrong.
    """
    fields = parse_object(value)
    try:
        store = parse_store(fields["store"])
        if store is None:
            raise ValueError("store is missing")
        return ShardRecord(
            store=store,
            engine=text(fields, "engine"),
            incarnation=text(fields, "incarnation"),
            model=text(fields, "model"),
            model_root=bytes.fromhex(text(fields, "model_root")),
            page_size=number(fields, "page_size"),
            format_version=number(fields, "format_version"),
            epoch=number(fields, "epoch"),
            renewed=number(fields, "renewed"),
        )
    except (KeyError, ValueError) as error:
        raise RecordError(f"a shard's record that cannot be read: {error}") from None
