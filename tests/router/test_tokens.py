from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jkv.router.tokens import TokenCache


def test_what_was_kept_comes_back_as_plain_ints() -> None:
    cache = TokenCache(10_000)
    cache.put(b"a text", [1, 2, 2**32 - 1])
    ids = cache.get(b"a text")
    assert ids == [1, 2, 2**32 - 1]
    assert ids is not None
    assert all(type(token) is int for token in ids)
    assert cache.get(b"another") is None
    assert (cache.hits, cache.misses) == (1, 1)


def test_the_least_recently_used_goes_first() -> None:
    cache = TokenCache(1100)  # two entries of 50 tokens
    cache.put(b"a", range(50))
    cache.put(b"b", range(50))
    assert cache.get(b"a") is not None
    cache.put(b"c", range(50))
    assert cache.get(b"b") is None
    assert cache.get(b"a") is not None
    assert cache.get(b"c") is not None


def test_ids_that_are_too_many_are_not_kept() -> None:
    cache = TokenCache(1100)
    cache.put(b"a", range(50))
    cache.put(b"b", range(1000))
    assert cache.get(b"b") is None
    assert cache.get(b"a") is not None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 400))))
def test_its_bytes_stay_within_bounds(puts: list[tuple[int, int]]) -> None:
    cache = TokenCache(4000)
    for source, count in puts:
        cache.put(bytes([source]), [source] * count)
        assert 0 <= cache.nbytes <= 4000
    for source in range(10):
        ids = cache.get(bytes([source]))
        assert ids is None or set(ids) <= {source}
