from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jkv.cache.keys import pack_tokens, page_keys
from jkv.cache.pages import page_infos

_ROOT, _PARENT = b"r" * 16, b"p" * 16


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.sampled_from([1, 8]))
def test_pages_are_full_chained_and_cut_from_the_tokens(tokens: list[int], page_size: int) -> None:
    infos = page_infos(_ROOT, _PARENT, tokens, page_size)
    full = len(tokens) // page_size
    assert [info.key for info in infos] == page_keys(_PARENT, tokens, page_size)
    assert [info.parent for info in infos] == [_PARENT, *(info.key for info in infos)][:full]
    assert b"".join(info.tokens for info in infos) == pack_tokens(tokens[: full * page_size])
    assert {info.root for info in infos} <= {_ROOT}
