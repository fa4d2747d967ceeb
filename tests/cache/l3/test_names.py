from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.cache.l3.names import OWNER, StoredPage, parse

KEYS = st.binary(min_size=16, max_size=16)


@given(
    st.from_regex(OWNER, fullmatch=True).filter(str.isascii),
    st.from_regex("[0-9a-f]{8}", fullmatch=True),
    KEYS,
    KEYS,
    st.binary(min_size=4, max_size=4),
)
def test_a_name_tells_the_page(owner: str, model8: str, key: bytes, parent: bytes, salt_tag: bytes) -> None:
    page = StoredPage(owner, model8, key, parent, salt_tag)
    assert parse(page.name) == page
    assert parse(page.quarantined_name) is None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "owner/lock",
        "owner/recency",
        "owner/01234567/about",
        f"owner/01234567/aa/{'aa' * 16}.{'bb' * 16}.01234567.tmp",
        f"owner/01234567/ab/{'aa' * 16}.{'bb' * 16}.01234567",  # not its shard
        f"owner/01234567/aa/{'AA' * 16}.{'bb' * 16}.01234567",
        f"owner/0123456/aa/{'aa' * 16}.{'bb' * 16}.01234567",
        f"deep/owner/01234567/aa/{'aa' * 16}.{'bb' * 16}.01234567",
    ],
)
def test_other_objects_are_no_pages(name: str) -> None:
    assert parse(name) is None
