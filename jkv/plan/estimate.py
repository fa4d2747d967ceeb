"""What is worth knowing of a model's speed before it runs: bounds for a few lengths and batches. No jax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jkv.plan.roofline import Roofline

# Tokens whose copying is told beside their computing.
RESTORED = 1000
_LENGTHS = (1024, 8192, 32768)
_BATCH_STEP = 4


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """Of one prompt with nothing beside it."""

    prompt_tokens: int
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Of a batch of sequences of one length; None where L1 does not hold them."""

    batch: int
    context_tokens: int
    tokens_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Nothing can be faster. `restore_s` is for copying `RESTORED` tokens' pages from L2, `compute_s` for
    computing them.
    """

    prefill: Sequence[Prefill]
    decode: Sequence[Decode]
    restore_s: float
    compute_s: float


def estimate(
    roofline: Roofline, *, max_model_len: int, max_num_seqs: int, max_batched_tokens: int, l1_tokens: int
) -> Estimate:
    """Up to the longest sequence and the largest batch of a server with these flags."""
    lengths = steps(_LENGTHS, max_model_len)
    return Estimate(
        prefill=[
            Prefill(prompt_tokens=n, tokens_per_s=n / roofline.prefill_seconds(n, max_batched_tokens))
            for n in lengths
        ],
        decode=[
            Decode(
                batch=batch,
                context_tokens=n,
                tokens_per_s=roofline.decode_tokens_per_s(batch, n) if batch * n <= l1_tokens else None,
            )
            for batch in batches(max_num_seqs)
            for n in lengths
        ],
        restore_s=roofline.restore_seconds(RESTORED),
        compute_s=roofline.prefill_seconds(RESTORED, max_batched_tokens),
    )


def steps(marks: Sequence[int], last: int) -> list[int]:
    """The marks below `last`, and `last`."""
    return [*(mark for mark in marks if mark < last), last]


def batches(most: int) -> list[int]:
    """1, 4, 16, ... and `most`."""
    return steps([_BATCH_STEP**i for i in range(most.bit_length())], most)
