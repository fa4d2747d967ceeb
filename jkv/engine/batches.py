"""From a schedule's chunks to the arrays of a step. Plain numpy; padding is written so that it touches
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jkv.engine.programs import ProgramPlan
from jkv.engine.sampling import SampleBatch
from jkv.engine.scheduler import Chunk
from jkv.engine.sequence import Sequence
from jkv.kernels.batch import StepBatch


@dataclass(frozen=True, kw_only=True)
class HostStep:
    """A step's arrays and buckets. `sampled[i]` is the sequence of row i of the sampling."""

    tokens: int
    batch: StepBatch[np.ndarray]
    sampled: tuple[Sequence, ...]


def build_step(chunks: Seq[Chunk], plan: ProgramPlan) -> HostStep:
    """Lays the chunks out back to back, single tokens first (see StepBatch)."""
    ordered = sorted(chunks, key=lambda c: c.count > 1)
    total = sum(c.count for c in ordered)
    bucket = next(b for b in plan.token_buckets if b >= total)
    step = empty_batch(plan, bucket)
    sampled: list[Sequence] = []
    row = 0
    for i, chunk in enumerate(ordered):
        rows, where = slice(row, row + chunk.count), np.arange(chunk.start, chunk.start + chunk.count)
        step.token_ids[rows] = _token_ids(chunk)
        step.positions[rows] = where
        step.write_offsets[rows] = where % plan.pool.page_size
        step.write_pages[rows] = _write_pages(chunk, where // plan.pool.page_size, plan.pool.pages)
        step.page_table[i, : len(chunk.seq.pages)] = chunk.seq.pages
        step.kv_lens[i], step.q_starts[i], step.q_lens[i] = chunk.start + chunk.count, row, chunk.count
        row += chunk.count
        if chunk.sample:
            step.sample_rows[len(sampled)] = row - 1
            sampled.append(chunk.seq)
    step.counts[:] = sum(c.count == 1 for c in ordered), len(ordered)
    return HostStep(tokens=bucket, batch=step, sampled=tuple(sampled))


def empty_batch(plan: ProgramPlan, tokens: int) -> StepBatch[np.ndarray]:
    """A StepBatch of writable numpy arrays with no sequence in it; every write is masked."""
    batch = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype),
        StepBatch.abstract(tokens, plan.max_num_seqs, plan.table_width, plan.sample_rows),
    )
    batch.write_pages[:] = plan.pool.pages
    return batch


def build_sampling(
    seqs: Seq[Sequence], plan: ProgramPlan, seed: int, rows: int = 0
) -> SampleBatch[np.ndarray]:
    """Sampling parameters of the sequences, padded to a bucket of at least `rows`.

    `seed` is the base for requests that bring none.
    """
    bucket = next(b for b in plan.sample_buckets if b >= max(len(seqs), rows))
    params = [s.request.sampling for s in seqs]

    def column(values: list[Any], pad: float, dtype: type) -> np.ndarray:
        return np.asarray(values + [pad] * (bucket - len(values)), dtype)

    seeds = np.zeros((bucket, 2), np.uint32)
    for i, seq in enumerate(seqs):
        value = request_seed(seq, seed)
        seeds[i] = value & 0xFFFFFFFF, value >> 32
    vocab = plan.config.vocab_size
    return SampleBatch(
        slots=column([s.slot for s in seqs], plan.max_num_seqs, np.int32),
        seeds=seeds,
        # The token being sampled is already counted as unread.
        positions=column([s.generated - 1 for s in seqs], 0, np.int32),
        temperature=column([p.temperature for p in params], 0, np.float32),
        top_k=column([p.top_k or vocab for p in params], vocab, np.int32),
        top_p=column([p.top_p for p in params], 1, np.float32),
        min_p=column([p.min_p for p in params], 0, np.float32),
        repetition=column([p.repetition_penalty for p in params], 1, np.float32),
        presence=column([p.presence_penalty for p in params], 0, np.float32),
        frequency=column([p.frequency_penalty for p in params], 0, np.float32),
        adjusted=np.asarray(any(p.adjusts_logits for p in params)),
        random=np.asarray(any(p.temperature > 0 for p in params)),
        filtered=np.asarray(any(p.filters for p in params)),
        logprobs=np.asarray(any(p.logprobs for p in params)),
    )


def request_seed(seq: Sequence, base: int) -> int:
    """The 64-bit seed of a request: its own, or one drawn from the server's seed and its arrival."""
    if seq.request.sampling.seed is not None:
        return seq.request.sampling.seed
    return int(np.random.SeedSequence([base, seq.arrival]).generate_state(1, np.uint64)[0])


def _token_ids(chunk: Chunk) -> np.ndarray:
    known = chunk.seq.tokens[chunk.start : chunk.start + chunk.count]
    if len(known) == chunk.count:
        return np.asarray(known, np.int32)
    # At most the last one is still on the device.
    assert len(known) == chunk.count - 1
    assert chunk.seq.slot is not None
    return np.asarray([*known, -1 - chunk.seq.slot], np.int32)


def _write_pages(chunk: Chunk, numbers: np.ndarray, masked: int) -> np.ndarray:
    pages = np.asarray(chunk.seq.pages, np.int32)[numbers]
    if chunk.frozen:
        pages = np.where(np.isin(numbers, list(chunk.frozen)), masked, pages)
    return pages
