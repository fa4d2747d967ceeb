"""What etcd is asked and what it answers: operations, conditions, errors. Pure; etcd.py sends them.

Keys are text here, and prefixes end with "/".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpc import StatusCode

from jkv.errors import JkvError
from jkv.router import etcd_rpc_pb2 as pb

_AUTH_TEXTS = ("user name is empty", "authentication failed", "authentication is not enabled")
_STALE_TOKEN_TEXTS = ("invalid auth token", "revision of auth store is old")
_GONE_TEXTS = ("has been compacted", "is a future revision")


class EtcdError(JkvError):
    """Something that etcd was asked and did not do; the message says what and why."""


class EtcdUnavailableError(EtcdError):
    """No member answered in time. What was asked may or may not have been done."""


class EtcdAuthError(EtcdError):
    """The user, the password or the user's rights do not allow it."""


class RevisionGoneError(EtcdError):
    """The revision was compacted, or is not of this store's history: list again."""


class LeaseLostError(EtcdError):
    """The lease has run out, or etcd has lost it."""


class StaleTokenError(EtcdAuthError):
    """The login is no longer known; log in again."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a key; `kv.value` is empty where it was deleted."""

    deleted: bool
    kv: KeyValue


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Of one key, or of all under a prefix that ends with "/"."""

    key: str


@dataclass(frozen=True, slots=True)
class Get:
    """Of one key, or of all under a prefix that ends with "/"."""

    key: str


Op = Put | Delete | Get


@dataclass(frozen=True, kw_only=True)
class TxnResult:
    """`found` has what each Get of the branch taken found, in order."""

    succeeded: bool
    revision: int
    found: tuple[tuple[KeyValue, ...], ...]


def absent(key: str) -> pb.Compare:
    """Holds if the key, or every key under the prefix, does not exist."""
    return pb.Compare(
        key=key.encode(), range_end=range_end(key), target=pb.Compare.CREATE, result=pb.Compare.EQUAL
    )


def exists(key: str) -> pb.Compare:
    return pb.Compare(key=key.encode(), target=pb.Compare.CREATE, result=pb.Compare.GREATER)


def modified_at(key: str, revision: int) -> pb.Compare:
    """Holds if the key's last change was at this revision; 0 if it does not exist."""
    return pb.Compare(key=key.encode(), target=pb.Compare.MOD, result=pb.Compare.EQUAL, mod_revision=revision)


def all_equal(prefix: str, value: bytes) -> pb.Compare:
    """Holds if there is a key under the prefix, and all there have this value."""
    return pb.Compare(
        key=prefix.encode(),
        range_end=range_end(prefix),
        target=pb.Compare.VALUE,
        result=pb.Compare.EQUAL,
        value=value,
    )


def range_end(key: str) -> bytes:
    """etcd's end of a range: empty for one key, else the first key after all that start so."""
    if not key.endswith("/"):
        return b""
    return key[:-1].encode() + b"0"  # "0" follows "/"


def txn_request(compares: Sequence[pb.Compare], then: Sequence[Op], otherwise: Sequence[Op]) -> pb.TxnRequest:
    return pb.TxnRequest(
        compare=compares, success=[_request(op) for op in then], failure=[_request(op) for op in otherwise]
    )


def txn_result(reply: pb.TxnResponse) -> TxnResult:
    return TxnResult(
        succeeded=reply.succeeded,
        revision=reply.header.revision,
        found=tuple(
            tuple(key_value(kv) for kv in one.response_range.kvs)
            for one in reply.responses
            if one.WhichOneof("response") == "response_range"
        ),
    )


def key_value(kv: pb.KeyValue) -> KeyValue:
    return KeyValue(kv.key.decode(errors="replace"), kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def events(reply: pb.WatchResponse) -> list[Event]:
    return [Event(event.type == pb.Event.DELETE, key_value(event.kv)) for event in reply.events]


def error(code: StatusCode | None, details: str, what: str) -> EtcdError:
    """The error that a failed call stands for; `what` says what was asked and of whom."""
    message = f"{what}: {details or code}"
    if any(text in details for text in _STALE_TOKEN_TEXTS):
        return StaleTokenError(message)
    if code in (StatusCode.UNAUTHENTICATED, StatusCode.PERMISSION_DENIED) or any(
        text in details for text in _AUTH_TEXTS
    ):
        return EtcdAuthError(message)
    if any(text in details for text in _GONE_TEXTS):
        return RevisionGoneError(message)
    if "lease not found" in details:
        return LeaseLostError(message)
    if code is StatusCode.DEADLINE_EXCEEDED:
        return EtcdUnavailableError(f"{what}: no answer in time")
    if code in (StatusCode.UNAVAILABLE, StatusCode.CANCELLED, StatusCode.INTERNAL, StatusCode.UNKNOWN, None):
        return EtcdUnavailableError(message)
    return EtcdError(message)


def _request(op: Op) -> pb.RequestOp:
    key, end = op.key.encode(), range_end(op.key)
    if isinstance(op, Put):
        return pb.RequestOp(request_put=pb.PutRequest(key=key, value=op.value, lease=op.lease))
    if isinstance(op, Delete):
        return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key, range_end=end))
    return pb.RequestOp(request_range=pb.RangeRequest(key=key, range_end=end))
