"""The metadata of one ragged step, shared by the model, the attention paths and the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

# What a metadata field holds: numpy on the host, jax inside a program, only a shape to compile with.
ArrayT = TypeVar("ArrayT", jax.Array, np.ndarray, jax.ShapeDtypeStruct)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepBatch(Generic[ArrayT]):
    """One ragged batch of decodes and prefill chunks, padded to its bucket. All arrays are int32.

    Sequences are ordered decodes first, so that decode `i` has flat row `i`; then prefill chunks, back to
    back. T is the token bucket, S the most sequences of a step, W the page table's width.
    """

    token_ids: ArrayT  # [T]; a negative value -1-slot stands for the last token sampled in that slot
    positions: ArrayT  # [T]
    write_pages: ArrayT  # [T] page that takes the token's K and V; the pool's page count masks the write
    write_offsets: ArrayT  # [T] row inside that page
    page_table: ArrayT  # [S, W] pages of each sequence in order; unused entries are 0
    kv_lens: ArrayT  # [S] keys visible to the sequence's last query of this step
    q_starts: ArrayT  # [S] flat row of the first query
    q_lens: ArrayT  # [S] queries in this step
    counts: ArrayT  # [2] how many sequences are decodes, how many sequences there are in all
    sample_rows: ArrayT  # [R] flat rows whose hidden states go to the sampler

    @staticmethod
    def abstract(
        tokens: int, seqs: int, table_width: int, sample_rows: int
    ) -> StepBatch[jax.ShapeDtypeStruct]:
        """Shapes and dtypes only, to lower and compile with."""

        def i32(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        per_token, per_seq = i32(tokens), i32(seqs)
        return StepBatch(
            token_ids=per_token,
            positions=per_token,
            write_pages=per_token,
            write_offsets=per_token,
            page_table=i32(seqs, table_width),
            kv_lens=per_seq,
            q_starts=per_seq,
            q_lens=per_seq,
            counts=i32(2),
            sample_rows=i32(sample_rows),
        )
