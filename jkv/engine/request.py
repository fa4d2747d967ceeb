"""What the engine is asked and what it answers. No jax: API servers and tests build these alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from jkv.cache.peers import PeerHint


class FinishReason(StrEnum):
    """Why a request ended; the values are those of the APIs."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Ranges are checked by `jkv.api.validate`, not here.

    `temperature == 0` is greedy. `top_k == 0` and `top_p == 1` and `min_p == 0` switch that filter off.
    `top_logprobs` is how many alternatives to report beside the sampled token when `logprobs` is set.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = 0

    @property
    def adjusts_logits(self) -> bool:
        """Whether penalties or a bias change the logits."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(self.logit_bias) or penalties != (1.0, 0.0, 0.0)

    @property
    def filters(self) -> bool:
        """Whether drawing leaves tokens out."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One sequence to generate. `prompt_ids` is not empty and every id is below the vocabulary size.

    `deadline` is in `time.monotonic()` seconds; a request past it ends with `CANCELLED`.
    A higher `priority` is scheduled earlier. `no_cache` neither reads nor fills the prefix cache. `resumed`
    are tokens that another engine has sampled for it already: they count as sampled here, and are not given
    out. `peer` is another engine that has more of the prompt's pages.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    no_cache: bool = False
    priority: int = 0
    deadline: float | None = None
    resumed: tuple[int, ...] = ()
    peer: PeerHint | None = None


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of `token_id` under the model's own distribution, before bias, penalties and
    filters.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class CachedByTier:
    """Prompt tokens served from each cache tier."""

    l1: int = 0
    l2: int = 0
    l3: int = 0
    peer: int = 0

    @property
    def total(self) -> int:
        return self.l1 + self.l2 + self.l3 + self.peer


@dataclass(frozen=True, kw_only=True)
class TokenOutput:
    """Newly sampled tokens of one request, the end token included; the last output has a `finish_reason`.

    `cached` is set from the first output on. `error` explains `FinishReason.ERROR`.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    finish_reason: FinishReason | None = None
    cached: CachedByTier = CachedByTier()
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What API servers need to know of an engine to validate and describe."""

    model: str
    vocab_size: int
    max_model_len: int
    page_size: int
    l1_pages: int
    eos_token_ids: frozenset[int]

    @property
    def max_tokens_in_l1(self) -> int:
        """The longest sequence (prompt and generated tokens) that the whole L1 can hold."""
        return self.l1_pages * self.page_size


# Takes an output; True ends the request.
Sink = Callable[[TokenOutput], bool]


class Generator(Protocol):
    """What the APIs talk to: a local engine, or later the router's choice of a remote one."""

    @property
    def info(self) -> EngineInfo: ...

    async def generate(self, request: EngineRequest, sink: Sink) -> None:
        """Run a request and give `sink` its outputs in order, on the caller's event loop; return after the
        last one. Cancelling the call, or `sink`, cancels the request and frees its pages at the next step.

        Raises:
            InvalidRequestError: it can never fit L1 or `max_model_len`.
            OverloadedError: the queue is full.
            ShuttingDownError: the engine drains.
            Exception: what `sink` raised.
        """
        ...
