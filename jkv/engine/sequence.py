"""One request's state while the engine works on it. Owner: the engine's thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from jkv.cache.keys import page_keys
from jkv.engine.request import EngineRequest, FinishReason


@dataclass(eq=False)
class Sequence:
    """A request, its tokens so far, and the pages that hold their keys and values.

    `computed` counts tokens whose K and V are in the pool, or will be once the dispatched steps have run.
    `unread` counts sampled tokens that the host has not fetched yet. The first `shared` pages are in the
    prefix index.
    """

    request: EngineRequest
    root: bytes
    arrival: int
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    unread: int = 0
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    slot: int | None = None
    admissions: int = 0  # how often it got a slot
    cached_tokens: int = 0  # prompt tokens served from the cache, when first admitted
    preempted: bool = False
    finish_reason: FinishReason | None = None
    keys: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def generated(self) -> int:
        """Sampled tokens, unread ones included."""
        return len(self.tokens) - self.prompt_len + self.unread

    @property
    def length(self) -> int:
        """Tokens of the sequence, unread ones included."""
        return len(self.tokens) + self.unread

    @property
    def wants_tokens(self) -> bool:
        return self.finish_reason is None and self.generated < self.request.sampling.max_tokens

    @property
    def is_decoding(self) -> bool:
        """All but the newest token are computed."""
        return self.computed == self.length - 1

    def key(self, page: int, page_size: int) -> bytes:
        """The key of the sequence's full page number `page`."""
        if page >= len(self.keys):
            known = len(self.keys) * page_size
            parent = self.keys[-1] if self.keys else self.root
            self.keys += page_keys(parent, self.tokens[known:], page_size)
        return self.keys[page]

    def page_tokens(self, page: int, page_size: int) -> list[int]:
        return self.tokens[page * page_size : (page + 1) * page_size]

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of who is served first: higher priority, then earlier arrival."""
        return (-self.request.priority, self.arrival)
