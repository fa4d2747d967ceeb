"""Paged attention in plain XLA: what CPUs run, and the reference for the Pallas kernels.

Running max/sum softmax over blocks of keys (Milakov and Gimelshein, arXiv:1805.02867; FlashAttention,
arXiv:2205.14135). Key blocks start at multiples of the block size whatever the chunk, so a query's reduction
order depends on its position alone, and a masked block leaves max, sum and output bit for bit as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jkv.kernels.batch import StepBatch
from jkv.kernels.kv_pool import KvArrays, from_stored, load_kv

_MASKED = -1e30


@dataclass(frozen=True, kw_only=True)
class AttentionBlocks:
    """Block sizes in tokens. A decode's bits equal a prefill's where key blocks are equal and both run the
    prefill's products (`one_path`).
    """

    prefill_queries: int = 256
    prefill_keys: int = 512
    decode_keys: int = 128
    one_path: bool = False


# XLA:CPU works on vectors of 256 bits unless told to use those of 512 that a processor has. Not where
# bits must not depend on the batch: what is left of a loop after its vectors may be rounded in another way.
CPU_OPTIONS: dict[str, str | bool] = {"xla_cpu_prefer_vector_width": "512"}

BATCH_INVARIANT_BLOCKS = AttentionBlocks(prefill_keys=128, one_path=True)
# Where bits must not depend on the batch, YNNPACK gets every product and no reduction. It sums a product of
# two rows or more in one order whatever their number, if the right side is contracted over its last axis;
# Eigen cuts long sums as the shape suggests. By default XLA:CPU gives YNNPACK large reductions as well, which
# it sums in another order than XLA's loops sum small ones.
BATCH_INVARIANT_CPU_OPTIONS: dict[str, str | bool] = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
}


class _Running(NamedTuple):
    peak: jax.Array  # [..., rows] running maximum
    total: jax.Array  # [..., rows] running sum of exponentials
    out: jax.Array  # [..., rows, width] unnormalized output


class _Sequence(NamedTuple):
    table: jax.Array  # [W]
    kv_len: jax.Array
    q_start: jax.Array
    q_len: jax.Array


def paged_attention(
    q: jax.Array,
    pool: KvArrays[jax.Array],
    layer: jax.Array,
    pages: int,
    batch: StepBatch[jax.Array],
    *,
    window: jax.Array,
    scale: float,
    soft_cap: float | None,
    blocks: AttentionBlocks,
) -> jax.Array:
    """Causal attention of every query over its sequence's pages, this step's keys included.

    Args:
        q: `[T, heads, head_dim]`.
        pool: the flat KV pool; rows past a sequence's length never reach the output.
        layer: int32 scalar, picks the pool rows `layer * pages ...`.
        window: int32 scalar; a query sees itself and the `window - 1` keys before it.
        soft_cap: where given, a logit x becomes `soft_cap * tanh(x / soft_cap)` (Gemma 2, arXiv:2408.00118).

    Returns:
        `[T, heads, head_dim]` in q's dtype; rows of padding are unspecified but finite.
    """
    run = _PagedAttention(pool, layer * pages, batch, window, scale, soft_cap, blocks, q)
    return run.prefill(run.decode(jnp.zeros_like(run.q)))[: q.shape[0]].astype(q.dtype)


class _PagedAttention:
    """One call's operands; the loops below close over them."""

    def __init__(
        self,
        pool: KvArrays[jax.Array],
        first_row: jax.Array,
        batch: StepBatch[jax.Array],
        window: jax.Array,
        scale: float,
        soft_cap: float | None,
        blocks: AttentionBlocks,
        q: jax.Array,
    ) -> None:
        _, self.page_size, width = pool.values.shape
        _, self.heads, self.head_dim = q.shape
        self.kv_heads = width // (2 * self.head_dim)
        self.group = self.heads // self.kv_heads
        self.pool = pool
        # By default TPUs and GPUs round the operands of float32 products, and XLA:TPU does so to the whole
        # pool before the loop.
        self.precision = lax.Precision.HIGHEST if pool.values.dtype == jnp.float32 else None
        self.first_row, self.batch, self.window = first_row, batch, window
        self.soft_cap, self.blocks = soft_cap, blocks
        self.q_block = min(blocks.prefill_queries, q.shape[0])
        # The last block of a chunk may reach past the batch: give it rows of its own to spill into.
        self.q = jnp.pad(q.astype(jnp.float32) * scale, ((0, self.q_block), (0, 0), (0, 0)))

    def _sequence(self, index: jax.Array) -> _Sequence:
        b = self.batch
        return _Sequence(b.page_table[index], b.kv_lens[index], b.q_starts[index], b.q_lens[index])

    def _load(self, seq: _Sequence, block: jax.Array, keys: int) -> jax.Array:
        """Keys and values of one key block, `[keys, 2 * kv_heads * head_dim]`, zero past the sequence's
        end.
        """
        kv = load_kv(self.pool, self._rows(seq, block, keys))
        return self._zero_past_end(kv, seq, block, keys)

    def _rows(self, seq: _Sequence, block: jax.Array, keys: int) -> jax.Array:
        """The pool rows of a key block's pages."""
        per_block = keys // self.page_size
        return self.first_row + lax.dynamic_slice(seq.table, (block * per_block,), (per_block,))

    def _zero_past_end(self, kv: jax.Array, seq: _Sequence, block: jax.Array, keys: int) -> jax.Array:
        """`[..., keys, width]` of a key block in float32."""
        used = block * keys + jnp.arange(keys) < seq.kv_len
        return jnp.where(used[:, None], kv.astype(jnp.float32), 0)

    def _first_block(self, position: jax.Array, keys: int) -> jax.Array:
        return jnp.maximum(position - self.window + 1, 0) // keys

    def _visible(self, block: jax.Array, keys: int, positions: jax.Array) -> jax.Array:
        key = block * keys + jnp.arange(keys)
        distance = positions[:, None] - key[None, :]
        return (distance >= 0) & (distance < self.window)

    def _masked(self, scores: jax.Array, seen: jax.Array) -> jax.Array:
        """Logits `[..., rows, keys]` under the soft cap, out of the softmax where `seen` is false."""
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        return jnp.where(seen, scores, _MASKED)

    def decode(self, out: jax.Array) -> jax.Array:
        """One query a sequence. A head's keys and values are read together, as they lie: q is zero over the
        values, and of what the weights sum only the half of the values counts.
        """
        if self.blocks.one_path:
            return self._decode_as_prefill(out)
        keys = max(self.blocks.decode_keys, self.page_size)

        def one(index: jax.Array, out: jax.Array) -> jax.Array:
            seq = self._sequence(index)
            position = seq.kv_len - 1
            q = self.q[index].reshape(self.kv_heads, self.group, self.head_dim)
            q = jnp.pad(q, ((0, 0), (0, 0), (0, self.head_dim)))

            def body(block: jax.Array, run: _Running) -> _Running:
                kv = self._load_by_head(seq, block, keys)
                # XLA:CPU copies a product's right operand into another order: let that be q. Without the
                # barrier XLA would swap them back.
                scores = jnp.einsum("hke,hre->hkr", kv, q, precision=self.precision)
                scores = lax.optimization_barrier(scores).transpose(0, 2, 1)
                seen = self._visible(block, keys, position[None])
                return _accumulate(
                    run,
                    self._masked(scores, seen[None]),
                    lambda p: jnp.einsum("hrk,hke->hre", p, kv, precision=self.precision),
                )

            start = _empty((self.kv_heads, self.group), 2 * self.head_dim)
            run = lax.fori_loop(self._first_block(position, keys), position // keys + 1, body, start)
            rows = (run.out / run.total[..., None])[..., self.head_dim :]
            return lax.dynamic_update_index_in_dim(out, rows.reshape(self.heads, self.head_dim), index, 0)

        return lax.fori_loop(0, self.batch.counts[0], one, out)

    def _load_by_head(self, seq: _Sequence, block: jax.Array, keys: int) -> jax.Array:
        """As `_load`, but `[kv_heads, keys, 2 * head_dim]`."""
        if self.pool.scales is not None:
            kv = self._load(seq, block, keys).reshape(keys, self.kv_heads, 2 * self.head_dim)
            return kv.transpose(1, 0, 2)
        # Gathers rows of one head: whole pages XLA:CPU would transpose in a pass of its own.
        pages = self._rows(seq, block, keys)
        tokens = (pages[:, None] * self.page_size + jnp.arange(self.page_size)).reshape(keys)
        rows = tokens * self.kv_heads + jnp.arange(self.kv_heads)[:, None]
        by_head = self.pool.values.reshape(-1, 2 * self.head_dim)
        kv = from_stored(by_head.at[rows].get(mode="promise_in_bounds"))
        return self._zero_past_end(kv, seq, block, keys)

    def _decode_as_prefill(self, out: jax.Array) -> jax.Array:
        # Two rows, the second one discarded: a product of one row rounds differently.
        return lax.fori_loop(
            0,
            self.batch.counts[0],
            lambda i, out: self._query_block(self._sequence(i), 0, out, queries=2),
            out,
        )

    def prefill(self, out: jax.Array) -> jax.Array:
        """Chunks of several queries, a block of queries at a time against its causal key blocks only."""

        def one(index: jax.Array, out: jax.Array) -> jax.Array:
            seq = self._sequence(index)
            blocks = (seq.q_len + self.q_block - 1) // self.q_block
            return lax.fori_loop(0, blocks, lambda i, out: self._query_block(seq, i, out, self.q_block), out)

        return lax.fori_loop(self.batch.counts[0], self.batch.counts[1], one, out)

    def _query_block(self, seq: _Sequence, index: jax.Array | int, out: jax.Array, queries: int) -> jax.Array:
        """In what is done to each score the rows of all heads have one axis: XLA:CPU cuts loops in two along
        the first one, and few heads would make uneven halves.
        """
        keys = max(self.blocks.prefill_keys, self.page_size)
        flat = seq.q_start + index * queries
        first = seq.kv_len - seq.q_len + index * queries
        q = lax.dynamic_slice_in_dim(self.q, flat, queries, 0)
        q = q.reshape(queries, self.kv_heads, self.group, self.head_dim)
        q = q.transpose(1, 0, 2, 3).reshape(self.kv_heads, queries * self.group, self.head_dim)
        positions = jnp.tile(jnp.repeat(first + jnp.arange(queries), self.group), self.kv_heads)
        # Faster as it lies, where bits may depend on the number of rows (see BATCH_INVARIANT_CPU_OPTIONS).
        v_axes = "hdk" if self.blocks.one_path else "hkd"

        def body(block: jax.Array, run: _Running) -> _Running:
            kv = self._load(seq, block, keys).reshape(keys, self.kv_heads, 2, self.head_dim)
            k, v = kv[:, :, 0].transpose(1, 0, 2), jnp.einsum(f"khd->{v_axes}", kv[:, :, 1])
            scores = jnp.einsum("hmd,hkd->hmk", q, k, precision=self.precision)

            def weigh(p: jax.Array) -> jax.Array:
                p = p.reshape(scores.shape)
                return jnp.einsum(f"hmk,{v_axes}->hmd", p, v, precision=self.precision)

            seen = self._visible(block, keys, positions)
            return _accumulate(run, self._masked(scores.reshape(-1, keys), seen), weigh)

        last = jnp.minimum(first + queries, seq.kv_len) - 1
        start = _empty((self.kv_heads, queries * self.group), self.head_dim)
        run = lax.fori_loop(self._first_block(first, keys), last // keys + 1, body, start)
        rows = run.out / run.total[..., None]
        rows = rows.reshape(self.kv_heads, queries, self.group, self.head_dim).transpose(1, 0, 2, 3)
        # Rows past the chunk's end land on the next chunk's rows, which that chunk then overwrites.
        return lax.dynamic_update_slice_in_dim(out, rows.reshape(queries, self.heads, self.head_dim), flat, 0)


def _empty(rows: tuple[int, ...], width: int) -> _Running:
    return _Running(jnp.full(rows, _MASKED), jnp.zeros(rows), jnp.zeros((*rows, width)))


def _accumulate(run: _Running, scores: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> _Running:
    """Takes in a key block's logits `[..., keys]`, whose rows may have other axes than those of `run`."""
    rows = run.peak.shape
    peak = jnp.maximum(run.peak, scores.max(axis=-1).reshape(rows))
    p = jnp.exp(scores - peak.reshape(*scores.shape[:-1], 1))
    decay = jnp.exp(run.peak - peak)
    total = run.total * decay + p.sum(axis=-1).reshape(rows)
    return _Running(peak, total, run.out * decay[..., None] + weigh(p))
