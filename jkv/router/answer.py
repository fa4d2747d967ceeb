"""What a client has received of its answers, and the request with which another engine goes on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jkv.api import jkv_pb2 as pb
from jkv.api.validate import MAX_REQUEST_ID_LENGTH

# Ends that are the engine's fault or doing, and not the answer's.
_BROKEN_ENDS = ("error", "cancelled")


@dataclass(kw_only=True)
class _Sequence:
    """One of the `n` answers, as far as it was sent."""

    token_ids: list[int] = field(default_factory=list)
    cached: pb.CachedByTier | None = None
    finished: bool = False


class Answer:
    """The answers of one request, whichever engines they come from. Each try has another request id, since an
    engine that was left may still run the one before.
    """

    def __init__(
        self, request: pb.GenerateRequest, prompt_ids: Sequence[int], *, new_id: str, seed: int
    ) -> None:
        """`new_id` and `seed` are used where the request brings none: another engine must draw the same."""
        self._request = pb.GenerateRequest()
        self._request.CopyFrom(request)
        self._request.token_ids.CopyFrom(pb.TokenIds(ids=prompt_ids))
        self._request.request_id = request.request_id or new_id
        if not request.sampling.HasField("seed"):
            self._request.sampling.seed = seed
        self.prompt_ids = list(prompt_ids)
        count = request.sampling.n if request.sampling.HasField("n") else 1
        # An engine refuses counts out of range; until then nothing is made for them.
        self._sequences = {index: _Sequence() for index in range(min(max(count, 1), 64))}
        self._attempts = 0

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def indexes(self) -> tuple[int, ...]:
        return tuple(self._sequences)

    @property
    def started(self) -> bool:
        """Whether the client has received anything."""
        return any(one.token_ids or one.finished for one in self._sequences.values())

    def unfinished(self, part: Sequence[int]) -> tuple[int, ...]:
        return tuple(index for index in part if not self._sequences[index].finished)

    def tokens(self, part: Sequence[int]) -> list[int]:
        """The tokens that an engine would start from: those of the prompt, and of an answer that goes on."""
        return self.prompt_ids + (self._sequences[part[0]].token_ids if len(part) == 1 else [])

    def request(self, part: Sequence[int]) -> pb.GenerateRequest:
        """What to ask an engine for: all answers if none has started, or what is left of one of them."""
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        suffix = f"~{self._attempts}" if self._attempts else ""
        self._attempts += 1
        if len(part) == 1:
            (index,) = part
            request.resume_token_ids.extend(self._sequences[index].token_ids)
            if len(self._sequences) > 1:
                request.sampling.n = 1
                request.sampling.seed = (self._request.sampling.seed + index) % 2**64
                suffix = f"-{index}{suffix}"
        # An id that is too long is refused as it was given.
        if suffix and len(request.request_id) <= MAX_REQUEST_ID_LENGTH:
            request.request_id = request.request_id[: MAX_REQUEST_ID_LENGTH - len(suffix)] + suffix
        return request

    def take(self, part: Sequence[int], chunk: pb.GenerateChunk) -> bool:
        """Make an engine's chunk one for the client, in place; False if it must not be sent.

        That is the last one of an answer that the engine gave up: its text has what was held back as the
        start of a character or of a stop string, which another engine will decide again.
        """
        if len(part) == 1:
            chunk.index = part[0]
        if chunk.finish_reason in _BROKEN_ENDS:
            return False
        sequence = self._sequences[chunk.index]
        sequence.token_ids.extend(chunk.token_ids)
        if chunk.HasField("cached_by_tier"):
            if sequence.cached is None:
                sequence.cached = pb.CachedByTier()
                sequence.cached.CopyFrom(chunk.cached_by_tier)
            else:
                chunk.ClearField("cached_by_tier")  # that of an engine that went on
        if chunk.finish_reason:
            sequence.finished = True
            if chunk.HasField("usage"):
                self._correct(chunk.usage, sequence)
        return True

    def given_up(self, part: Sequence[int]) -> list[pb.GenerateChunk]:
        """The last chunks of answers that nobody goes on with."""
        return [self._error_chunk(index) for index in self.unfinished(part)]

    def _error_chunk(self, index: int) -> pb.GenerateChunk:
        sequence = self._sequences[index]
        sequence.finished = True
        usage = pb.Usage(prompt_tokens=len(self.prompt_ids), completion_tokens=len(sequence.token_ids))
        self._correct(usage, sequence)
        return pb.GenerateChunk(index=index, finish_reason="error", usage=usage)

    def _correct(self, usage: pb.Usage, sequence: _Sequence) -> None:
        """Cached is what the engine that began the answer had of the prompt, not one that went on."""
        if sequence.cached is not None:
            usage.cached_by_tier.CopyFrom(sequence.cached)
            tiers = sequence.cached
            usage.cached_tokens = tiers.l1 + tiers.l2 + tiers.l3 + tiers.peer
