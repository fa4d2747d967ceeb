"""What a cluster keeps in etcd about its engines: names of keys, and records as JSON. Pure.

/jkv/<cluster>/history                 made once: another value means that etcd was emptied
/jkv/<cluster>/engines/<id>            an engine, or why it was refused, or that it has left; leased
/jkv/<cluster>/models/<model>/<id>     what this engine's pages look like; leased. All of a model are equal
/jkv/<cluster>/shards/<store>/<owner>  who writes the pages of an owner in a store; see shards.py
/jkv/<cluster>/extents/<store>/<owner>/<number>  keys of its pages
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from jkv.errors import FailedPreconditionError, JkvError


class RecordError(JkvError):
    """A record in etcd that jkv did not write, or another version of it."""


class EngineRefusedError(FailedPreconditionError):
    """This engine does not fit the cluster's others of its model; the message says how to go on."""


@dataclass(frozen=True, kw_only=True)
class StoreRef:
    """Where an engine's L3 is. Engines that found the same token in the store see the same store."""

    url: str
    token: str
    owner: str


@dataclass(frozen=True, kw_only=True)
class EngineRecord:
    """An engine of a cluster. `incarnation` differs in every process."""

    id: str
    address: str  # HOST:PORT of its gRPC server
    incarnation: str
    model: str  # the name that clients ask for
    model_root: bytes
    page_size: int
    kv_dtype: str
    format_version: int
    tiers: tuple[str, ...]  # those that are on
    version: str  # of jkv
    store: StoreRef | None = None  # where L3 is on

    @property
    def pages(self) -> PagesOfModel:
        return PagesOfModel(
            model_root=self.model_root.hex(),
            page_size=self.page_size,
            kv_dtype=self.kv_dtype,
            format_version=self.format_version,
        )


@dataclass(frozen=True, kw_only=True)
class PagesOfModel:
    """What all engines of one model name share."""

    model_root: str
    page_size: int
    kv_dtype: str
    format_version: int

    def difference(self, other: PagesOfModel) -> str:
        """For people: what differs from `other`; empty if nothing does."""
        parts = []
        for item in dataclasses.fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if mine != theirs:
                parts.append(f"{item.name} {mine} (this engine), {theirs} (the others)")
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True)
class RefusedRecord:
    id: str
    address: str
    refused: str  # why


@dataclass(frozen=True, kw_only=True)
class LeftRecord:
    """An engine that left on purpose: the deletion that follows is no accident."""

    id: str
    left: bool = True


MemberRecord = EngineRecord | RefusedRecord | LeftRecord


def history_key(cluster: str) -> str:
    return f"/jkv/{cluster}/history"


def engines_prefix(cluster: str) -> str:
    return f"/jkv/{cluster}/engines/"


def engine_key(cluster: str, engine: str) -> str:
    return f"{engines_prefix(cluster)}{engine}"


def model_prefix(cluster: str, model: str) -> str:
    return f"/jkv/{cluster}/models/{quote(model, safe='')}/"


def encode(record: Any) -> bytes:
    """A dataclass as JSON, the same for the same content; bytes in hex."""
    return json.dumps(dataclasses.asdict(record), sort_keys=True, default=_hex).encode()


def parse_pages(value: bytes) -> PagesOfModel:
    """
    Raises:
        RecordError: not such a record.
    """
    fields = parse_object(value)
    try:
        return PagesOfModel(
            model_root=text(fields, "model_root"),
            page_size=number(fields, "page_size"),
            kv_dtype=text(fields, "kv_dtype"),
            format_version=number(fields, "format_version"),
        )
    except (KeyError, ValueError) as error:
        raise RecordError(f"a record of a model's pages that cannot be read: {error}") from None


def parse_member(value: bytes) -> MemberRecord:
    """
    Raises:
        RecordError: not such a record; says what is wrong.
    """
    fields = parse_object(value)
    try:
        if "refused" in fields:
            return RefusedRecord(
                id=text(fields, "id"), address=text(fields, "address"), refused=text(fields, "refused")
            )
        if "left" in fields:
            return LeftRecord(id=text(fields, "id"))
        return _engine(fields)
    except (KeyError, ValueError) as error:
        raise RecordError(f"an engine's record that cannot be read: {error}") from None


def _engine(fields: dict[str, Any]) -> EngineRecord:
    tiers = fields["tiers"]
    if not isinstance(tiers, list) or not all(isinstance(tier, str) for tier in tiers):
        raise ValueError(f"tiers {tiers!r} are no list of names")
    return EngineRecord(
        id=text(fields, "id"),
        address=text(fields, "address"),
        incarnation=text(fields, "incarnation"),
        model=text(fields, "model"),
        model_root=bytes.fromhex(text(fields, "model_root")),
        page_size=number(fields, "page_size"),
        kv_dtype=text(fields, "kv_dtype"),
        format_version=number(fields, "format_version"),
        tiers=tuple(tiers),
        version=text(fields, "version"),
        store=parse_store(fields["store"]),
    )


def parse_store(value: object) -> StoreRef | None:
    """
    Raises:
        ValueError, KeyError: not a store.
    """
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"store {value!r} is no object")
    return StoreRef(url=text(value, "url"), token=text(value, "token"), owner=text(value, "owner"))


def parse_object(value: bytes) -> dict[str, Any]:
    """
    Raises:
        RecordError: not a JSON object.
    """
    try:
        fields = json.loads(value)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise RecordError(f"a record that is no JSON object: {value[:80]!r}")
    return fields


def text(fields: dict[str, Any], name: str) -> str:
    """
    Raises:
        KeyError, ValueError: the field is missing or something else.
    """
    value = fields[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} {value!r} is no text")
    return value


def number(fields: dict[str, Any], name: str) -> int:
    """
    Raises:
        KeyError, ValueError: the field is missing or something else.
    """
    value = fields[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} {value!r} is no number of 0 or more")
    return value


def _hex(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{value!r} does not go into a record")
