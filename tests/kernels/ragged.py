"""Ragged batches over a poisoned pool, and what attention must give for them, in float64 numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from jkv.kernels.batch import StepBatch
from jkv.kernels.kv_pool import KvArrays, PoolShape, stored_dtype, to_stored
from jkv.kernels.xla_attention import (
    BATCH_INVARIANT_BLOCKS,
    BATCH_INVARIANT_CPU_OPTIONS,
    CPU_OPTIONS,
    paged_attention,
)

NO_WINDOW = int(np.iinfo(np.int32).max)
MAX_TOKENS = 1024
MAX_SEQS = 6
BUCKET = 64
_LAYERS, _LAYER = 2, 1
# On both sides of pages of 8 to 64 and of key blocks of 128 and 512.
_BORDERS = [n + d for n in (8, 16, 64, 128, 256, 512, 1024) for d in (-1, 0, 1) if n + d <= MAX_TOKENS]
_LENGTHS = st.one_of(st.sampled_from(_BORDERS), st.integers(1, MAX_TOKENS))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a test varies between compilations."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    window: int = NO_WINDOW
    soft_cap: float | None = None
    kv_dtype: str = "float32"

    def __str__(self) -> str:
        window = "" if self.window == NO_WINDOW else f"-window{self.window}"
        cap = "" if self.soft_cap is None else f"-cap{self.soft_cap:g}"
        return (
            f"{self.heads}/{self.kv_heads}x{self.head_dim}-page{self.page_size}{window}{cap}-{self.kv_dtype}"
        )

    @property
    def table_width(self) -> int:
        return MAX_TOKENS // self.page_size

    @property
    def pool(self) -> PoolShape:
        return PoolShape(
            layers=_LAYERS,
            pages=MAX_SEQS * self.table_width + 1,
            page_size=self.page_size,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=stored_dtype(self.kv_dtype, "cpu"),
        )


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The last `queries` tokens of a sequence with keys and values of `[kv_len, kv_heads, head_dim]`."""

    pages: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    q: np.ndarray  # [queries, heads, head_dim]

    @property
    def kv_len(self) -> int:
        return len(self.keys)

    def split(self, start: int, stop: int) -> Chunk:
        """Queries `start:stop` of this chunk, with the keys they may see."""
        end = self.kv_len - len(self.q) + stop
        return Chunk(pages=self.pages, keys=self.keys[:end], values=self.values[:end], q=self.q[start:stop])


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    """`(kv_len, queries)` of the sequences of a step of up to BUCKET tokens, decodes first, and how many are
    decodes.
    """
    decodes = draw(st.lists(_LENGTHS, max_size=4))
    chunks: list[tuple[int, int]] = []
    left = BUCKET - len(decodes)
    for _ in range(draw(st.integers(0, MAX_SEQS - len(decodes)))):
        queries = min(draw(st.integers(2, 40)), left)
        if queries >= 2:
            chunks.append((max(draw(_LENGTHS), queries), queries))
            left -= queries
    return [(n, 1) for n in decodes] + chunks, len(decodes)


def random_chunks(
    shape: Shape, rng: np.random.Generator, lengths: Sequence[tuple[int, int]], shared_pages: int = 0
) -> list[Chunk]:
    """Chunks of the given `(kv_len, queries)` on random pages. The first `shared_pages` full pages are those
    of the first sequence, where both are long enough.

    Page 0 stays free: unused table entries point there.
    """
    free = rng.permutation(np.arange(1, shape.pool.pages))
    chunks: list[Chunk] = []
    for kv_len, queries in lengths:
        count = -(-kv_len // shape.page_size)
        pages, free = free[:count].copy(), free[count:]
        keys, values = (_rounded(shape, rng, kv_len, shape.kv_heads) for _ in range(2))
        if chunks:
            first = chunks[0]
            shared = min(shared_pages, kv_len // shape.page_size, first.kv_len // shape.page_size)
            pages[:shared] = first.pages[:shared]
            tokens = shared * shape.page_size
            keys[:tokens], values[:tokens] = first.keys[:tokens], first.values[:tokens]
        q = rng.normal(size=(queries, shape.heads, shape.head_dim)).astype(np.float32)
        chunks.append(Chunk(pages=pages, keys=keys, values=values, q=q))
    return chunks


def attend(
    shape: Shape,
    chunks: Sequence[Chunk],
    *,
    tokens: int,
    decodes: int,
    blocks: Any,
    kernel: Callable[..., jax.Array] = paged_attention,
    q_dtype: str = "float32",
) -> np.ndarray:
    """Runs a kernel, with blocks of its kind, on chunks laid out back to back in a bucket of `tokens` rows,
    the first `decodes` of them as decodes. Returns all rows, as float32.
    """
    q = np.zeros((tokens, shape.heads, shape.head_dim), np.float32)
    used = np.concatenate([c.q for c in chunks]) if chunks else q[:0]
    q[: len(used)] = used
    run = _compiled(shape, kernel, blocks)
    out = run(jnp.asarray(q, q_dtype), _poisoned_pool(shape, chunks), _batch(shape, chunks, tokens, decodes))
    return np.asarray(out, np.float32)


def expected(shape: Shape, chunk: Chunk) -> np.ndarray:
    """Softmax attention of one chunk, query by query, in float64."""
    group = shape.heads // shape.kv_heads
    out = np.empty(chunk.q.shape)
    for i, query in enumerate(chunk.q.astype(np.float64)):
        position = chunk.kv_len - len(chunk.q) + i
        seen = slice(max(0, position - shape.window + 1), position + 1)
        keys, values = (
            np.repeat(x[seen].astype(np.float64), group, axis=1) for x in (chunk.keys, chunk.values)
        )
        scores = np.einsum("hd,khd->hk", query, keys) / np.sqrt(shape.head_dim)
        if shape.soft_cap is not None:
            scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[i] = np.einsum("hk,khd->hd", weights / weights.sum(axis=1, keepdims=True), values)
    return out


def assert_close(out: np.ndarray, shape: Shape, chunks: Sequence[Chunk]) -> None:
    """That the chunks' rows of `out` are those of `expected`."""
    want = [expected(shape, c) for c in chunks]
    if want:
        used = sum(len(c.q) for c in chunks)
        np.testing.assert_allclose(out[:used], np.concatenate(want), rtol=0, atol=1e-5)


def _rounded(shape: Shape, rng: np.random.Generator, tokens: int, heads: int) -> np.ndarray:
    values = rng.normal(size=(tokens, heads, shape.head_dim)).astype(np.float32)
    if shape.kv_dtype == "bfloat16":
        return values.astype(ml_dtypes.bfloat16).astype(np.float32)
    if shape.kv_dtype == "int8":
        steps, scales = _quantized(values)
        return steps * scales[..., None]
    return values


@cache
def _compiled(shape: Shape, kernel: Callable[..., jax.Array], blocks: Any) -> Callable[..., jax.Array]:
    def run(q: jax.Array, pool: KvArrays[jax.Array], batch: StepBatch[jax.Array]) -> jax.Array:
        return kernel(
            q,
            pool,
            jnp.int32(_LAYER),
            shape.pool.pages,
            batch,
            window=jnp.int32(shape.window),
            scale=shape.head_dim**-0.5,
            soft_cap=shape.soft_cap,
            blocks=blocks,
        )

    options = BATCH_INVARIANT_CPU_OPTIONS if blocks == BATCH_INVARIANT_BLOCKS else CPU_OPTIONS
    return jax.jit(run, compiler_options=options)


def _poisoned_pool(shape: Shape, chunks: Sequence[Chunk]) -> KvArrays[jax.Array]:
    """The chunks' keys and values in their pages; NaN in every other row of every page and layer, or as the
    scale of every other int8.
    """
    pool = np.full((*shape.pool.shape[:2], 2 * shape.kv_heads, shape.head_dim), np.nan, np.float32)
    for chunk in chunks:
        where = np.arange(chunk.kv_len)
        rows = np.stack([chunk.keys, chunk.values], axis=2).reshape(chunk.kv_len, -1, shape.head_dim)
        page = _LAYER * shape.pool.pages + chunk.pages[where // shape.page_size]
        pool[page, where % shape.page_size] = rows
    if not shape.pool.quantized:
        rows = jnp.asarray(pool.reshape(shape.pool.shape))
        return KvArrays(values=to_stored(rows, shape.pool.dtype), scales=None)
    steps, scales = _quantized(pool)
    by_head = scales.transpose(0, 2, 1).reshape(len(pool), -1)
    return KvArrays(values=jnp.asarray(steps.reshape(shape.pool.shape)), scales=jnp.asarray(by_head))


def _quantized(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `jkv.kernels.kv_pool.quantize`; NaN gives a scale of NaN."""
    scales = np.abs(rows).max(axis=-1) / np.float32(127)
    with np.errstate(invalid="ignore"):
        return np.round(rows / scales[..., None]).astype(np.int8), scales


def _batch(shape: Shape, chunks: Sequence[Chunk], tokens: int, decodes: int) -> StepBatch[np.ndarray]:
    batch = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype),
        StepBatch.abstract(tokens, MAX_SEQS, shape.table_width, MAX_SEQS),
    )
    row = 0
    for i, chunk in enumerate(chunks):
        batch.page_table[i, : len(chunk.pages)] = chunk.pages
        batch.kv_lens[i], batch.q_starts[i], batch.q_lens[i] = chunk.kv_len, row, len(chunk.q)
        row += len(chunk.q)
    batch.counts[:] = decodes, len(chunks)
    return batch
