"""Other engines, as this one asks them for pages. No jax, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class PeerHint:
    """Where a router has seen the first `pages` pages of a prompt."""

    address: str
    pages: int


class PeerClient(Protocol):
    """Asks other engines for pages, on threads of its own."""

    def fetch(
        self,
        address: str,
        model_root: bytes,
        keys: Sequence[bytes],
        page: Callable[[bytes], None],
        ended: Callable[[str], None],
    ) -> Callable[[], None]:
        """Has `page` called with each page object in order, then `ended` with "" or what went wrong. Returns
        a function that cancels it.
        """
        ...
