from __future__ import annotations

import json

import pytest

from jkv.router import records
from jkv.router.records import LeftRecord, RecordError, RefusedRecord, StoreRef
from tests.router.engine_records import engine


@pytest.mark.parametrize(
    "record",
    [
        engine(),
        engine(store=StoreRef(url="file:///pages", token="t", owner="o"), tiers=("l1", "l3")),
        RefusedRecord(id="one", address="one:1", refused="other pages"),
        LeftRecord(id="one"),
    ],
)
def test_records_come_back_as_they_were(record: records.MemberRecord) -> None:
    assert records.parse_member(records.encode(record)) == record


def test_pages_come_back_and_tell_what_differs() -> None:
    pages = engine().pages
    assert records.parse_pages(records.encode(pages)) == pages
    assert pages.difference(pages) == ""
    other = engine(page_size=16, kv_dtype="int8").pages
    assert pages.difference(other) == (
        "page_size 64 (this engine), 16 (the others); kv_dtype float32 (this engine), int8 (the others)"
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"page_size": "64"}, "page_size"),
        ({"page_size": True}, "page_size"),
        ({"model_root": "xyz"}, "hex"),
        ({"tiers": "l1"}, "tiers"),
        ({"store": []}, "store"),
        ({"store": {"url": "file:///"}}, "token"),
        ({"address": None}, "address"),
    ],
)
def test_a_record_of_something_else_is_refused_by_the_field(change: dict[str, object], named: str) -> None:
    fields = json.loads(records.encode(engine()))
    with pytest.raises(RecordError, match=named):
        records.parse_member(json.dumps(fields | change).encode())


@pytest.mark.parametrize("value", [b"", b"[]", b"{}", b"\xff", b"nonsense"])
def test_what_is_no_record_is_refused(value: bytes) -> None:
    with pytest.raises(RecordError):
        records.parse_member(value)
    with pytest.raises(RecordError):
        records.parse_pages(value)


def test_a_models_name_stays_one_part_of_the_key() -> None:
    assert records.model_prefix("c", "org/a b") == "/jkv/c/models/org%2Fa%20b/"
