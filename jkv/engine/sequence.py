"""One request's state while the engine works on it. Owner: the engine's thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from jkv.cache.load import Load
from jkv.cache.pages import PageInfo, Source, page_infos
from jkv.engine.request import CachedByTier, EngineRequest, FinishReason


@dataclass(eq=False)
class Sequence:
    """A request, its tokens so far, and the pages that hold their keys and values.

    `computed` counts tokens whose K and V are in the pool, or will be once the dispatched steps have run.
    `unread` counts sampled tokens that the host has not fetched yet. The first `shared` pages are in the
    prefix index. `load` brings pages from lower tiers until the sequence has what it will get of them.
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
    cached: dict[Source, int] = field(default_factory=dict)  # prompt tokens by tier, until first preempted
    hits: list[tuple[Source, int, int]] = field(default_factory=list)  # with page, tokens; not yet counted
    load: Load | None = None
    expected: int = 0  # tokens of whole pages that were cached when it came
    preempted: bool = False
    finish_reason: FinishReason | None = None
    infos: list[PageInfo] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt_ids, *self.request.resumed]

    @property
    def to_compute(self) -> int:
        """Tokens known now whose K and V are neither in the pool nor expected from the cache."""
        return len(self.tokens) - max(self.computed, min(self.expected, len(self.tokens) - 1))

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

    def info(self, page: int, page_size: int) -> PageInfo:
        """The identity of the sequence's full page number `page`."""
        if page >= len(self.infos):
            known = len(self.infos) * page_size
            parent = self.infos[-1].key if self.infos else self.root
            self.infos += page_infos(self.root, parent, self.tokens[known:], page_size)
        return self.infos[page]

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached.values())

    @property
    def cached_by_tier(self) -> CachedByTier:
        return CachedByTier(**{str(source): count for source, count in self.cached.items()})

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of who is served first: higher priority, then earlier arrival."""
        return (-self.request.priority, self.arrival)
