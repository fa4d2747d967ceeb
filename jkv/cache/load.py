"""What is being brought up from lower tiers for one sequence. Owner: the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from jkv.cache.pages import PageInfo
from jkv.cache.peers import PeerHint


class PageState(Enum):
    """What a load can say of a page now."""

    READY = auto()  # in L2
    COMING = auto()  # being read into L2
    ABSENT = auto()  # to be computed, as all pages after it


@dataclass(eq=False, slots=True)
class L2Page:
    """A page in L2, or on its way there from L3 or a peer: then `payload` is None.

    `payload` is whatever the device's side makes of a page in host memory. A page with holds is not evicted.
    """

    info: PageInfo
    payload: Any | None
    holds: int = 0
    failed: bool = False  # its read did not succeed; it is of no use to anyone
    promised: bool = False  # has a hold until it is written to L3
    cancel: Callable[[], None] | None = None  # of its read
    fetched: bool = False  # from a peer


@dataclass(eq=False)
class Load:
    """The pages of a prompt that L2 and L3 may bring: numbers below `end`, as far as L1 lacks them.

    `next` is the first page whose read has not been considered yet. `held` are the pages read for it, or that
    it waits for together with others. `late_at` is set when somebody waits for it.
    """

    infos: Sequence[PageInfo]
    end: int
    next: int = 0
    held: dict[int, L2Page] = field(default_factory=dict)
    late_at: float | None = None
    peer: PeerHint | None = None
    local_end: int = 0  # pages from here on come from the peer
