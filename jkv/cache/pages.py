"""What tiers below the device know of a page beside its bytes. No jax, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from jkv.cache.keys import pack_tokens, page_keys

SALT_TAG_BYTES = 4


class Tier(StrEnum):
    """The levels of the cache, nearest first."""

    L1 = "l1"
    L2 = "l2"
    L3 = "l3"


# Beside the tiers, where a page may come from: another engine's.
PEER = "peer"
Source = str  # a Tier, or PEER


@dataclass(frozen=True, slots=True)
class PageInfo:
    """A full page's identity. Two pages are the same only if all four agree."""

    key: bytes  # 16 bytes, see jkv.cache.keys
    parent: bytes  # 16 bytes: the key of the page before it, or its request root
    root: bytes  # 16 bytes: the request root, which tells models and salts apart
    tokens: bytes  # packed, see jkv.cache.keys.pack_tokens

    @property
    def salt_tag(self) -> bytes:
        """4 bytes that requests of one salt share; enough to evict a salt by, not to trust."""
        return self.root[:SALT_TAG_BYTES]


def page_infos(root: bytes, parent: bytes, tokens: Sequence[int], page_size: int) -> list[PageInfo]:
    """Every full page of `tokens`, which follow the page with key `parent` (or the request root itself)."""
    keys, packed, step = page_keys(parent, tokens, page_size), pack_tokens(tokens), 4 * page_size
    return [
        PageInfo(key, before, root, packed[i * step : (i + 1) * step])
        for i, (key, before) in enumerate(zip(keys, [parent, *keys], strict=False))
    ]
