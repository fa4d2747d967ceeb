"""The TPU kernel's body: which keys a block of queries needs, and having their pages copied ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jkv.kernels.kv_pool import KvArrays
from jkv.kernels.tpu_softmax import Problem, Ref, Running, accumulate, clear, result, start


class Scalars(NamedTuple):
    """In scalar memory before the kernel starts."""

    call: Ref  # [4] the layer's first pool row, window, first sequence, end of sequences
    kv_lens: Ref  # [S]
    q_starts: Ref  # [S]
    q_lens: Ref  # [S]


class Scratch(NamedTuple):
    """Memory that keeps its contents from one block of queries to the next."""

    kv: KvArrays[Ref]  # two copied blocks of pages: [2, copied_pages, page_size, width], scales [..., 1, ...]
    tables: Ref  # two page tables of sequences, [2, 1, W], in scalar memory
    state: Ref  # [2] the sequence that the next block starts with, and which half of `kv` comes next
    kv_sems: Ref  # [2]
    table_sems: Ref  # [2]
    running: Running


def scratch_shapes(problem: Problem, pool: KvArrays[jax.Array], table_width: int) -> Any:
    """The `Scratch` of a kernel over `pool`."""
    heads, rows = problem.heads, problem.rows

    def copied(x: jax.Array) -> Ref:
        return pltpu.VMEM((2, problem.copied_pages, *(1, *x.shape[1:])[-2:]), x.dtype)

    return Scratch(
        kv=jax.tree.map(copied, pool),
        tables=pltpu.SMEM((2, 1, table_width), jnp.int32),
        state=pltpu.SMEM((2,), jnp.int32),
        kv_sems=pltpu.SemaphoreType.DMA((2,)),
        table_sems=pltpu.SemaphoreType.DMA((2,)),
        running=Running(
            peak=pltpu.VMEM((heads.kv_heads, rows, 1), jnp.float32),
            total=pltpu.VMEM((heads.kv_heads, rows, 1), jnp.float32),
            out=pltpu.VMEM((heads.kv_heads, rows, heads.value_lanes), jnp.float32),
        ),
    )


class _Keys(NamedTuple):
    """The keys that one sequence's queries in one block may see, first and last."""

    first: jax.Array
    last: jax.Array


class _Item(NamedTuple):
    """One copied block of keys of a sequence, for a block of queries."""

    seq: jax.Array
    keys: _Keys
    number: jax.Array  # of the copied block, from the sequence's beginning


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One step of the grid: a block of queries, of as many sequences as have some there."""

    problem: Problem
    scalars: Scalars
    q: Ref  # [1, kv_heads, rows, key_lanes]
    tables: Ref  # [S, W] in HBM
    pool: KvArrays[Ref]  # in HBM
    out: Ref  # [1, kv_heads, rows, value_lanes]
    scratch: Scratch

    def run(self) -> None:
        block, scratch = pl.program_id(0), self.scratch
        pl.when(block == 0)(self._begin)
        start(scratch.running)
        first = scratch.state[0]
        starts = self.scalars.q_starts[jnp.minimum(first, self.scalars.q_starts.shape[0] - 1)]
        here = (first < self._end_seq) & (starts < (block + 1) * self.problem.block.queries)
        next_seq, _ = lax.while_loop(
            lambda carry: carry[1], lambda carry: self._sequence(carry[0], block), (first, here)
        )
        scratch.state[0] = next_seq
        self.out[0] = result(scratch.running).astype(self.out.dtype)

    @property
    def _end_seq(self) -> jax.Array:
        return self.scalars.call[3]

    def _begin(self) -> None:
        """Before the first block: starts what every item finds started."""
        first = self.scalars.call[2]
        self.scratch.state[0] = first
        self.scratch.state[1] = 0

        @pl.when(first < self._end_seq)
        def _() -> None:
            self._table(first).start()
            block = _div(self.scalars.q_starts[first], self.problem.block.queries)
            self._enter(first)
            self._start(self._first_item(first, block), 0)

    def _enter(self, seq: jax.Array) -> None:
        """Waits for a sequence's page table, and starts the next one's."""
        self._table(seq).wait()

        @pl.when(seq + 1 < self._end_seq)
        def _() -> None:
            self._table(seq + 1).start()

    def _table(self, seq: jax.Array) -> Any:
        half = seq & 1
        scratch = self.scratch
        row = self.tables.at[pl.ds(seq, 1)]
        return pltpu.make_async_copy(row, scratch.tables.at[half], scratch.table_sems.at[half])

    def _keys(self, seq: jax.Array, block: jax.Array) -> _Keys:
        queries, scalars = self.problem.block.queries, self.scalars
        start, count = scalars.q_starts[seq], scalars.q_lens[seq]
        to_position = scalars.kv_lens[seq] - count - start
        first = jnp.maximum(block * queries, start) + to_position
        last = jnp.minimum((block + 1) * queries, start + count) - 1 + to_position
        return _Keys(first=jnp.maximum(first - scalars.call[1] + 1, 0), last=last)

    def _first_item(self, seq: jax.Array, block: jax.Array) -> _Item:
        keys = self._keys(seq, block)
        return _Item(seq=seq, keys=keys, number=_div(keys.first, self.problem.block.copied))

    def _sequence(self, seq: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Attends with a sequence's queries in the block. Returns the sequence to go on with, and whether it
        has queries in this block.
        """
        scalars, size = self.scalars, self.problem.block
        item, block_end = self._first_item(seq, block), (block + 1) * size.queries
        end = scalars.q_starts[seq] + scalars.q_lens[seq]
        last = _div(item.keys.last, size.copied)
        next_seq = jnp.where(end > block_end, seq, seq + 1)
        next_block = jnp.where(end < block_end, block, block + 1)
        positions = self._positions(seq, block)

        def copied(index: jax.Array, _: None) -> None:
            half = self.scratch.state[1]
            pl.when(index < last)(lambda: self._start(item._replace(number=index + 1), 1 - half))

            @pl.when((index == last) & (next_seq < self._end_seq))
            def _() -> None:
                pl.when(next_seq != seq)(lambda: self._enter(next_seq))
                self._start(self._first_item(next_seq, next_block), 1 - half)

            self._attend(item._replace(number=index), positions, half)
            self.scratch.state[1] = 1 - half

        lax.fori_loop(item.number, last + 1, copied, None)
        return next_seq, (end < block_end) & (next_seq < self._end_seq)

    def _start(self, item: _Item, half: jax.Array | int) -> None:
        """Starts copying an item's pages."""
        first_row = self.scalars.call[0]

        def copy(page: jax.Array) -> None:
            row = first_row + self.scratch.tables[item.seq & 1, 0, page]
            for one in self._page_copies(row, item, page, half):
                one.start()

        self._pages(item, copy)

    def _wait(self, item: _Item, half: jax.Array) -> None:
        def wait(page: jax.Array) -> None:
            # Of a copy only the size counts here.
            for copy in self._page_copies(0, item, page, half):
                copy.wait()

        self._pages(item, wait)

    def _pages(self, item: _Item, act: Callable[[jax.Array], None]) -> None:
        """Has `act` called with the number, in its sequence, of each page that an item needs."""
        size, count = self.problem.page_size, self.problem.copied_pages
        first = jnp.maximum(_div(item.keys.first, size), item.number * count)
        end = jnp.minimum(_div(item.keys.last, size) + 1, (item.number + 1) * count)
        lax.fori_loop(first, end, lambda page, _: act(page), None)

    def _page_copies(
        self, row: jax.Array | int, item: _Item, page: jax.Array, half: jax.Array | int
    ) -> list[Any]:
        where, sem = page - item.number * self.problem.copied_pages, self.scratch.kv_sems.at[half]
        pool, kv = self.pool, self.scratch.kv
        copies = [pltpu.make_async_copy(pool.values.at[row], kv.values.at[half, where], sem)]
        if pool.scales is not None and kv.scales is not None:
            row = pool.scales.at[pl.ds(row, 1)]
            copies.append(pltpu.make_async_copy(row, kv.scales.at[half, where], sem))
        return copies

    def _positions(self, seq: jax.Array, block: jax.Array) -> jax.Array:
        """Of every row, `[rows, 1]`; -1, before all keys, where it is of another sequence."""
        queries, scalars = self.problem.block.queries, self.scalars
        start, count = scalars.q_starts[seq], scalars.q_lens[seq]
        row = lax.broadcasted_iota(jnp.int32, (self.problem.rows, 1), 0)
        query = block * queries + (row & (queries - 1)) - start
        return jnp.where((query >= 0) & (query < count), query + scalars.kv_lens[seq] - count, -1)

    def _attend(self, item: _Item, positions: jax.Array, half: jax.Array) -> None:
        """Attends to an item's keys, as many at a time as a block computes with."""
        self._wait(item, half)
        size = self.problem.block
        first_page = _div(item.keys.first, self.problem.page_size)
        copied = _Keys(first=first_page * self.problem.page_size, last=item.keys.last)
        steps = size.copied // size.keys
        first = jnp.maximum(_div(item.keys.first, size.keys), item.number * steps)
        end = jnp.minimum(_div(item.keys.last, size.keys) + 1, (item.number + 1) * steps)

        def step(index: jax.Array, _: None) -> None:
            keys, part = index * size.keys, index - item.number * steps
            pages = size.keys // self.problem.page_size
            kv = jax.tree.map(lambda x: x.at[half, pl.ds(part * pages, pages)], self.scratch.kv)
            partial = (keys < copied.first) | (keys + size.keys - 1 > copied.last)
            pl.when(partial)(lambda: clear(kv, copied.first - keys, copied.last - keys))
            key = keys + lax.broadcasted_iota(jnp.int32, (1, size.keys), 1)
            seen = (key <= positions) & (key > positions - self.scalars.call[1])
            for head in range(self.problem.heads.kv_heads):
                accumulate(self.problem, self.scratch.running, self.q, kv, seen, head)

        lax.fori_loop(first, end, step, None)


def _div(a: jax.Array, b: int) -> jax.Array:
    """Rounded down, for an `a` that is not negative: `//` would look at signs."""
    return lax.div(a, jnp.int32(b))
