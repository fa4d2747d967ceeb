"""What a store holds, told from names alone, and in which order it was used."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from xxhash import xxh3_128_digest

from jkv.cache.keys import KEY_BYTES
from jkv.cache.l3 import names
from jkv.cache.l3.names import StoredPage
from jkv.cache.l3.objects import KvObjects

_CHECKSUM_BYTES = 16


@dataclass(frozen=True, slots=True)
class StalePage:
    """An own page of another model or format version; it only takes room."""

    page: StoredPage
    cost: int  # bytes on disk


@dataclass(frozen=True, kw_only=True)
class Listing:
    """All pages of a store that concern one engine."""

    own: list[StoredPage]  # the least recently used first
    foreign: list[StoredPage]  # of the same model, from other owners: to read, never to write or delete
    stale: list[StalePage]


def build(
    objects: KvObjects, owner: str, model8: str, stale_costs: Mapping[str, int], recency: Iterable[bytes]
) -> Listing:
    """Lists the store. `stale_costs` are costs of a page by model; others' pages are left out.

    Pages that `recency` knows come first, in its order, then the others by age: on file systems by the time
    they were written; object stores do not list times, there their order is that of their keys.

    Raises:
        ObjectError: the store cannot be listed.
    """
    own: list[StoredPage] = []
    foreign: list[StoredPage] = []
    stale: list[StalePage] = []
    for name in objects.list():
        page = names.parse(name)
        if page is None:
            continue
        if page.model8 == model8:
            (own if page.owner == owner else foreign).append(page)
        elif page.owner == owner and page.model8 in stale_costs:
            stale.append(StalePage(page, stale_costs[page.model8]))
    rank = {key: position for position, key in enumerate(recency)}
    known = sorted((page for page in own if page.key in rank), key=lambda page: rank[page.key])
    new = [page for page in own if page.key not in rank]
    return Listing(own=known + _by_age(objects, new), foreign=foreign, stale=stale)


def foreign(objects: KvObjects, owner: str, model8: str) -> list[StoredPage]:
    """The pages of one model that other owners have.

    Raises:
        ObjectError: the store cannot be listed.
    """
    if objects.root is not None and not _others(objects.root, owner):
        return []
    pages = (names.parse(name) for name in objects.list())
    return [p for p in pages if p is not None and p.model8 == model8 and p.owner != owner]


def encode_recency(keys: Iterable[bytes]) -> bytes:
    body = b"".join(keys)
    return body + xxh3_128_digest(body)


def decode_recency(data: bytes | None) -> list[bytes]:
    """The keys saved, oldest first; none where a crash damaged them."""
    if data is None or len(data) < _CHECKSUM_BYTES:
        return []
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if len(body) % KEY_BYTES or xxh3_128_digest(body) != checksum:
        return []
    return [body[start : start + KEY_BYTES] for start in range(0, len(body), KEY_BYTES)]


def _others(root: str | os.PathLike[str], owner: str) -> bool:
    """Whether a directory has other owners at all: most have none, and then looking costs next to nothing."""
    try:
        return any(entry.name != owner and entry.is_dir() for entry in os.scandir(root))
    except OSError:
        return False


def _by_age(objects: KvObjects, pages: list[StoredPage]) -> list[StoredPage]:
    root = objects.root
    if root is None:
        return sorted(pages, key=lambda page: page.key)
    prefix = f"{root}/"

    def written(page: StoredPage) -> int:
        try:
            return os.stat(prefix + page.name).st_mtime_ns
        except OSError:
            return 0

    return sorted(pages, key=written)
