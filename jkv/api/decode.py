"""Request bytes to messages, with an answer for bytes that are not one.

gRPC answers a failing deserializer with INTERNAL and no reason. Here the failure travels on as a value, so
that the servicer can say INVALID_ARGUMENT and name the field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

M = TypeVar("M", bound=Message)

_LENGTH_DELIMITED = 2


@dataclass(frozen=True, kw_only=True)
class Malformed:
    """Bytes that are no message of the expected type."""

    field: str
    reason: str


def deserializer(message_type: type[M]) -> Callable[[bytes], M | Malformed]:
    """A gRPC request deserializer that returns `Malformed` where parsing fails."""

    def parse(data: bytes) -> M | Malformed:
        try:
            return message_type.FromString(data)
        except DecodeError:
            return _explain(data, cast(Descriptor, message_type.DESCRIPTOR))

    return parse


def _explain(data: bytes, descriptor: Descriptor) -> Malformed:
    field = _field_not_utf8(data, descriptor)
    if field:
        return Malformed(field=field, reason="is not valid UTF-8")
    return Malformed(field="request", reason=f"is not a valid {descriptor.full_name} message")


def _field_not_utf8(data: bytes, descriptor: Descriptor) -> str:
    """The path of the first string field whose bytes are not UTF-8, or "".

    Parsed as an empty message every field is an unknown one, and unknown bytes are kept unchecked.
    """
    message = Empty()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return ""
    for item in UnknownFieldSet(message):
        field = descriptor.fields_by_number.get(item.field_number)
        if field is None or item.wire_type != _LENGTH_DELIMITED:
            continue
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(item.data):
            return field.name
        if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
            inner = _field_not_utf8(item.data, field.message_type)
            if inner:
                return f"{field.name}.{inner}"
    return ""


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
