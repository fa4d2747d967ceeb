"""The TPU's kernel, interpreted on CPU: as XLA programs, and with the memories and copies of a TPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from jkv.kernels.kv_pool import KvArrays, from_stored
from jkv.kernels.tpu_attention import paged_attention
from jkv.kernels.tpu_blocks import BlockSize, TpuBlocks
from jkv.kernels.xla_attention import AttentionBlocks
from tests.kernels.ragged import BUCKET, Chunk, Shape, assert_close, attend, random_chunks, steps

SHAPES = [
    Shape(heads=9, kv_heads=3, head_dim=64, page_size=64),
    Shape(heads=4, kv_heads=2, head_dim=96, page_size=16, window=70, kv_dtype="int8"),
    Shape(heads=8, kv_heads=1, head_dim=128, page_size=32, window=5, soft_cap=5, kv_dtype="bfloat16"),
    Shape(heads=2, kv_heads=2, head_dim=256, page_size=256, soft_cap=30),
]
# Borders of blocks, of queries and of keys, lie inside of chunks and between them.
STEP, DECODES = [(700, 1), (257, 1), (128, 1), (300, 33), (30, 21)], 3


def blocks(shape: Shape, decode_queries: int = 8) -> TpuBlocks:
    """Small, so that a thousand keys are many."""
    keys = max(128, shape.page_size)
    return TpuBlocks(
        decode=BlockSize(queries=decode_queries, keys=keys, copied=2 * keys),
        prefill=BlockSize(queries=16, keys=keys, copied=2 * keys),
        vmem_limit=2**24,
    )


def interpreted(q: jax.Array, pool: KvArrays[jax.Array], *args: Any, **kwargs: Any) -> jax.Array:
    return paged_attention(q, _as_on_tpu(pool), *args, interpret=True, **kwargs)


def simulated(q: jax.Array, pool: KvArrays[jax.Array], *args: Any, **kwargs: Any) -> jax.Array:
    """On memories like a TPU's: NaN at first, of a fixed size, and a copy changes them when waited for."""
    params = pltpu.InterpretParams(
        dma_execution_mode="on_wait",
        detect_races=True,
        uninitialized_memory="nan",
        out_of_bounds_reads="raise",
    )
    return paged_attention(q, _as_on_tpu(pool), *args, interpret=params, **kwargs)


@pytest.mark.parametrize("shape", [*SHAPES[:3], pytest.param(SHAPES[3], marks=pytest.mark.full)], ids=str)
@settings(max_examples=10, deadline=None)
@given(step=steps(), shared_pages=st.sampled_from([0, 3]), seed=st.integers(0, 2**32 - 1))
def test_equals_float64_whatever_lies_outside_the_rows_in_use(
    shape: Shape, step: tuple[list[tuple[int, int]], int], shared_pages: int, seed: int
) -> None:
    sequences, decodes = step
    chunks = random_chunks(shape, np.random.default_rng(seed), sequences, shared_pages)
    out = _attend(shape, chunks, decodes)
    assert np.isfinite(out).all()
    assert_close(out, shape, chunks)


@pytest.mark.parametrize("tokens", [8, pytest.param(1, marks=pytest.mark.full)])
def test_in_steps_of_a_few_tokens_chunks_run_beside_decodes(tokens: int) -> None:
    shape = SHAPES[0]
    lengths = [(300, 1)] if tokens == 1 else [(300, 1), (200, 5), (2, 2)]
    chunks = random_chunks(shape, np.random.default_rng(5), lengths)
    assert_close(_attend(shape, chunks, 1, tokens=tokens), shape, chunks)


@pytest.mark.parametrize("shape", [SHAPES[1], pytest.param(SHAPES[0], marks=pytest.mark.full)], ids=str)
def test_copies_are_waited_for_and_stay_in_bounds(shape: Shape, capfd: pytest.CaptureFixture[str]) -> None:
    chunks = random_chunks(shape, np.random.default_rng(1), STEP)
    out = _attend(shape, chunks, DECODES, kernel=simulated)
    assert_close(out, shape, chunks)
    assert np.isfinite(out).all()
    assert "RACE" not in capfd.readouterr().out


def test_a_page_may_lie_in_a_sequence_more_than_once() -> None:
    shape = SHAPES[0]
    rng = np.random.default_rng(2)
    (chunk,) = random_chunks(shape, rng, [(700, 20)])
    order = rng.integers(0, 3, len(chunk.pages))
    rows = (order[:, None] * shape.page_size + np.arange(shape.page_size)).reshape(-1)[: chunk.kv_len]
    again = Chunk(pages=chunk.pages[order], keys=chunk.keys[rows], values=chunk.values[rows], q=chunk.q)
    repeated = [again.split(19, 20), again]
    assert_close(_attend(shape, repeated, 1), shape, repeated)


@pytest.mark.parametrize("shape", [SHAPES[2], pytest.param(SHAPES[1], marks=pytest.mark.full)], ids=str)
def test_equals_the_reference_in_bfloat16(shape: Shape) -> None:
    chunks = random_chunks(shape, np.random.default_rng(3), STEP)
    out = _attend(shape, chunks, DECODES, q_dtype="bfloat16")
    want = attend(shape, chunks, tokens=BUCKET, decodes=DECODES, blocks=AttentionBlocks(), q_dtype="bfloat16")
    # The weights of the values are rounded to bfloat16 as well.
    np.testing.assert_allclose(out[:57], want[:57], rtol=0, atol=2e-2)


def test_bits_do_not_depend_on_how_a_sequence_is_cut_up_nor_on_its_neighbours() -> None:
    shape = SHAPES[0]
    whole, other = random_chunks(shape, np.random.default_rng(4), [(300, 60), (277, 3)])
    alone = _attend(shape, [whole], 0, decode_queries=16)[:60]
    for start, stop in ((0, 1), (59, 60), (13, 14), (5, 40), (17, 59)):
        parts = [whole.split(start, stop), other]
        # XLA:CPU's products of as many rows: those of other numbers it sums in another order.
        rows = _attend(shape, parts, int(stop - start == 1), decode_queries=16)[: stop - start]
        assert rows.tobytes() == alone[start:stop].tobytes()


def _attend(
    shape: Shape,
    chunks: list[Chunk],
    decodes: int,
    *,
    tokens: int = BUCKET,
    decode_queries: int = 8,
    kernel: Callable[..., jax.Array] = interpreted,
    q_dtype: str = "float32",
) -> np.ndarray:
    return attend(
        shape,
        chunks,
        tokens=tokens,
        decodes=decodes,
        blocks=blocks(shape, decode_queries),
        kernel=kernel,
        q_dtype=q_dtype,
    )


def _as_on_tpu(pool: KvArrays[jax.Array]) -> KvArrays[jax.Array]:
    """A TPU's pool holds bfloat16 itself (see `stored_dtype`)."""
    return KvArrays(values=from_stored(pool.values), scales=pool.scales)
