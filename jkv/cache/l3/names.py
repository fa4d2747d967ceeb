"""Names of objects in a store. Pure.

<owner>/lock                                              held while an engine writes under this owner
<owner>/recency, <owner>/budget                           see store.py and budget.py
<owner>/quarantine/<page's name>                          bad pages, a few of them
<owner>/<model root 8>/about                              what all pages of this model share
<owner>/<model root 8>/<shard>/<key>.<parent>.<salt tag>  a page; the shard is the key's first byte
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jkv.cache.pages import PageInfo

OWNER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
SHARDS = 256
_PAGE = re.compile(r"([^/]+)/([0-9a-f]{8})/([0-9a-f]{2})/(\3[0-9a-f]{30})\.([0-9a-f]{32})\.([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class StoredPage:
    """What a listing tells of a page, without reading it."""

    owner: str
    model8: str  # first 8 hex digits of the model root
    key: bytes
    parent: bytes
    salt_tag: bytes

    @property
    def name(self) -> str:
        key = self.key.hex()
        return f"{self.owner}/{self.model8}/{key[:2]}/{key}.{self.parent.hex()}.{self.salt_tag.hex()}"

    @property
    def quarantined_name(self) -> str:
        return f"{self.owner}/quarantine/{self.name.rpartition('/')[2]}"


def page_of(owner: str, model8: str, info: PageInfo) -> StoredPage:
    return StoredPage(owner, model8, info.key, info.parent, info.salt_tag)


def parse(name: str) -> StoredPage | None:
    """The page that this name stands for; None for every other object."""
    match = _PAGE.fullmatch(name)
    if match is None:
        return None
    owner, model8, _, key, parent, salt_tag = match.groups()
    return StoredPage(owner, model8, bytes.fromhex(key), bytes.fromhex(parent), bytes.fromhex(salt_tag))


def lock(owner: str) -> str:
    return f"{owner}/lock"


def recency(owner: str) -> str:
    return f"{owner}/recency"


def budget(owner: str) -> str:
    return f"{owner}/budget"


def quarantine(owner: str) -> str:
    """The prefix of bad pages."""
    return f"{owner}/quarantine/"


def model(owner: str, model8: str) -> str:
    """The prefix of a model's objects."""
    return f"{owner}/{model8}/"


def about(owner: str, model8: str) -> str:
    return f"{owner}/{model8}/about"
