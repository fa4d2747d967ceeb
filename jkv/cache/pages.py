"""What tiers below the device know of a page beside its bytes. No jax, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SALT_TAG_BYTES = 4


class Tier(StrEnum):
    """The levels of the cache, nearest first."""

    L1 = "l1"
    L2 = "l2"
    L3 = "l3"


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
