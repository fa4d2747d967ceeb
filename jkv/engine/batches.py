"""From a schedule's chunks to the arrays of a step. Plain numpy; padding is written so that it touches
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from jkv.engine.packing import packed_size, views
from jkv.engine.programs import ProgramPlan
from jkv.engine.sampling import SampleBatch
from jkv.engine.scheduler import Chunk
from jkv.engine.sequence import Sequence
from jkv.kernels.batch import StepBatch


@dataclass(frozen=True, kw_only=True)
class HostStep:
    """A step's arrays and buckets. `batch` are views of `packed`; `sampled[i]` is the sequence of row i of
    the sampling.
    """

    tokens: int
    packed: np.ndarray
    batch: StepBatch[np.ndarray]
    sampled: tuple[Sequence, ...]


def build_step(chunks: Seq[Chunk], plan: ProgramPlan) -> HostStep:
    """Lays the chunks out back to back, single tokens first (see StepBatch)."""
    ordered = sorted(chunks, key=lambda c: c.count > 1)
    total = sum(c.count for c in ordered)
    bucket = next(b for b in plan.token_buckets if b >= total)
    packed, step = empty_batch(plan, bucket)
    sampled: list[Sequence] = []
    row = 0
    for i, chunk in enumerate(ordered):
        if chunk.count == 1:
            _put_token(step, row, chunk, plan)
        else:
            _put_tokens(step, slice(row, row + chunk.count), chunk, plan)
        step.page_table[i, : len(chunk.seq.pages)] = chunk.seq.pages
        step.kv_lens[i], step.q_starts[i], step.q_lens[i] = chunk.start + chunk.count, row, chunk.count
        row += chunk.count
        if chunk.sample:
            step.sample_rows[len(sampled)] = row - 1
            sampled.append(chunk.seq)
    step.counts[:] = sum(c.count == 1 for c in ordered), len(ordered)
    return HostStep(tokens=bucket, packed=packed, batch=step, sampled=tuple(sampled))


def empty_batch(plan: ProgramPlan, tokens: int) -> tuple[np.ndarray, StepBatch[np.ndarray]]:
    """A packed batch with no sequence in it, and its fields; every write is masked."""
    layout = _step_layout(tokens, plan.max_num_seqs, plan.table_width, plan.sample_rows)
    packed = np.zeros(packed_size(layout), np.int32)
    batch = views(packed, layout)
    batch.write_pages[:] = plan.pool.pages
    return packed, batch


class SamplingInputs:
    """Packed sampling parameters of the sequences that each step samples.

    `seed` is the base for requests that bring none.
    """

    def __init__(self, plan: ProgramPlan, seed: int) -> None:
        self._plan, self._seed = plan, seed
        self._rows: list[tuple[Sequence, int | None]] = []
        self._packed = np.zeros(0, np.int32)

    def build(self, seqs: Seq[Sequence], rows: int = 0) -> tuple[int, np.ndarray]:
        """The bucket, of at least `rows`, and a new vector. While the same sequences go on, only positions
        change.
        """
        bucket = next(b for b in self._plan.sample_buckets if b >= max(len(seqs), rows))
        layout, same = _sample_layout(bucket), [(seq, seq.slot) for seq in seqs]
        if not seqs or same != self._rows:
            self._rows, self._packed = same, np.zeros(packed_size(layout), np.int32)
            _put_parameters(views(self._packed, layout), seqs, self._plan, self._seed)
        packed = self._packed.copy()
        # The token being sampled is already counted as unread.
        views(packed, layout).positions[: len(seqs)] = [seq.generated - 1 for seq in seqs]
        return bucket, packed


def _put_parameters(
    batch: SampleBatch[np.ndarray], seqs: Seq[Sequence], plan: ProgramPlan, seed: int
) -> None:
    params, vocab = [s.request.sampling for s in seqs], plan.config.vocab_size

    def put(column: np.ndarray, values: list[Any], pad: float) -> None:
        column[: len(values)], column[len(values) :] = values, pad

    put(batch.slots, [s.slot for s in seqs], plan.max_num_seqs)
    for i, seq in enumerate(seqs):
        value = request_seed(seq, seed)
        batch.seeds[i] = value & 0xFFFFFFFF, value >> 32
    put(batch.temperature, [p.temperature for p in params], 0)
    put(batch.top_k, [p.top_k or vocab for p in params], vocab)
    put(batch.top_p, [p.top_p for p in params], 1)
    put(batch.min_p, [p.min_p for p in params], 0)
    put(batch.repetition, [p.repetition_penalty for p in params], 1)
    put(batch.presence, [p.presence_penalty for p in params], 0)
    put(batch.frequency, [p.frequency_penalty for p in params], 0)
    batch.adjusted[...] = any(p.adjusts_logits for p in params)
    batch.random[...] = any(p.temperature > 0 for p in params)
    batch.filtered[...] = any(p.filters for p in params)
    batch.logprobs[...] = any(p.logprobs for p in params)


def request_seed(seq: Sequence, base: int) -> int:
    """The 64-bit seed of a request: its own, or one drawn from the server's seed and its arrival."""
    if seq.request.sampling.seed is not None:
        return seq.request.sampling.seed
    return int(np.random.SeedSequence([base, seq.arrival]).generate_state(1, np.uint64)[0])


def _put_token(step: StepBatch[np.ndarray], row: int, chunk: Chunk, plan: ProgramPlan) -> None:
    """What `_put_tokens` does, for one token: most rows are decodes, and numpy is slow on short arrays."""
    seq, position = chunk.seq, chunk.start
    number, offset = divmod(position, plan.pool.page_size)
    step.token_ids[row] = seq.tokens[position] if position < len(seq.tokens) else _on_device(seq)
    step.positions[row] = position
    step.write_offsets[row] = offset
    step.write_pages[row] = plan.pool.pages if number in chunk.frozen else seq.pages[number]


def _put_tokens(step: StepBatch[np.ndarray], rows: slice, chunk: Chunk, plan: ProgramPlan) -> None:
    where = np.arange(chunk.start, chunk.start + chunk.count)
    numbers = where // plan.pool.page_size
    step.token_ids[rows] = _token_ids(chunk)
    step.positions[rows] = where
    step.write_offsets[rows] = where % plan.pool.page_size
    pages = np.asarray(chunk.seq.pages, np.int32)[numbers]
    if chunk.frozen:
        pages = np.where(np.isin(numbers, list(chunk.frozen)), plan.pool.pages, pages)
    step.write_pages[rows] = pages


def _token_ids(chunk: Chunk) -> list[int]:
    known = chunk.seq.tokens[chunk.start : chunk.start + chunk.count]
    if len(known) == chunk.count:
        return known
    # At most the last one is still on the device.
    assert len(known) == chunk.count - 1
    return [*known, _on_device(chunk.seq)]


def _on_device(seq: Sequence) -> int:
    """Stands for the newest token, which the host has not read."""
    assert seq.slot is not None
    return -1 - seq.slot


@lru_cache
def _step_layout(*sizes: int) -> StepBatch[jax.ShapeDtypeStruct]:
    return StepBatch.abstract(*sizes)


@lru_cache
def _sample_layout(rows: int) -> SampleBatch[jax.ShapeDtypeStruct]:
    return SampleBatch.abstract(rows)
