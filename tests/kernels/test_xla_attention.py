from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.kernels.xla_attention import BATCH_INVARIANT_BLOCKS, AttentionBlocks
from tests.kernels.ragged import BUCKET, Chunk, Shape, assert_close, attend, expected, random_chunks, steps

SHAPES = [
    Shape(heads=4, kv_heads=4, head_dim=16, page_size=8),
    Shape(heads=9, kv_heads=3, head_dim=64, page_size=64),
    Shape(heads=4, kv_heads=1, head_dim=16, page_size=16, window=5),
    Shape(heads=4, kv_heads=2, head_dim=16, page_size=16, window=300, soft_cap=1.5),
    Shape(heads=1, kv_heads=1, head_dim=16, page_size=8, window=100),
    Shape(heads=6, kv_heads=2, head_dim=64, page_size=16, window=130, kv_dtype="bfloat16"),
    Shape(heads=4, kv_heads=2, head_dim=16, page_size=64, kv_dtype="bfloat16"),
    Shape(heads=9, kv_heads=3, head_dim=64, page_size=16, kv_dtype="int8"),
    Shape(heads=4, kv_heads=1, head_dim=16, page_size=64, window=70, kv_dtype="int8"),
]


@pytest.mark.parametrize("blocks", [AttentionBlocks(), BATCH_INVARIANT_BLOCKS], ids=["default", "invariant"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=12, deadline=None)
@given(step=steps(), shared_pages=st.sampled_from([0, 3]), seed=st.integers(0, 2**32 - 1))
def test_equals_float64_whatever_lies_outside_the_rows_in_use(
    shape: Shape,
    blocks: AttentionBlocks,
    step: tuple[list[tuple[int, int]], int],
    shared_pages: int,
    seed: int,
) -> None:
    sequences, decodes = step
    chunks = random_chunks(shape, np.random.default_rng(seed), sequences, shared_pages)
    out = attend(shape, chunks, tokens=BUCKET, decodes=decodes, blocks=blocks)
    assert np.isfinite(out).all()
    assert_close(out, shape, chunks)


def test_bfloat16_queries_give_bfloat16_rows() -> None:
    shape = next(s for s in SHAPES if s.kv_dtype == "bfloat16" and s.head_dim == 16)
    chunks = random_chunks(shape, np.random.default_rng(0), [(300, 1), (200, 17)])
    exact = [Chunk(pages=c.pages, keys=c.keys, values=c.values, q=_bfloat16(c.q)) for c in chunks]
    out = attend(shape, exact, tokens=BUCKET, decodes=1, blocks=AttentionBlocks(), q_dtype="bfloat16")
    want = np.concatenate([expected(shape, c) for c in exact])
    np.testing.assert_allclose(out[: len(want)], want, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(heads=4, kv_heads=4, head_dim=16, page_size=8),
        Shape(heads=9, kv_heads=3, head_dim=64, page_size=64),
        Shape(heads=4, kv_heads=1, head_dim=16, page_size=16, window=150),
        Shape(heads=1, kv_heads=1, head_dim=64, page_size=8),
        Shape(heads=4, kv_heads=2, head_dim=64, page_size=16, window=150, soft_cap=2.0),
        Shape(heads=8, kv_heads=2, head_dim=16, page_size=16, kv_dtype="bfloat16"),
        Shape(heads=9, kv_heads=3, head_dim=64, page_size=64, kv_dtype="int8"),
        Shape(heads=7, kv_heads=7, head_dim=72, page_size=16),
        Shape(heads=3, kv_heads=1, head_dim=64, page_size=16),
        Shape(heads=6, kv_heads=2, head_dim=32, page_size=256),
    ],
    ids=str,
)
def test_a_query_has_the_same_bits_as_a_decode_and_in_any_chunk_and_bucket(shape: Shape) -> None:
    rng = np.random.default_rng(7)
    whole, other = random_chunks(shape, rng, [(300, 300), (77, 77)])
    alone = attend(shape, [whole], tokens=512, decodes=0, blocks=BATCH_INVARIANT_BLOCKS)[:300]
    for bucket, width in ((2, 2), (4, 3), (16, 16), (64, 41), (128, 100)):
        for start in range(0, 300 - width, 97):
            part = whole.split(start, start + width)
            before = [other.split(0, n) for n in [(bucket - width) // 2] if n > 1]
            rows = _invariant(shape, [*before, part], bucket, 0)[-1]
            assert _same_bits(rows, alone[start : start + width]), f"{width} from {start} in {bucket}"
    for bucket, decodes in ((2, 1), (2, 2), (4, 4)):
        for start in range(3, 300 - decodes, 71):
            parts = [whole.split(i, i + 1) for i in range(start, start + decodes)]
            rows = np.concatenate(_invariant(shape, parts, bucket, decodes))
            assert _same_bits(rows, alone[start : start + decodes]), (
                f"{decodes} decodes from {start} in {bucket}"
            )


def _invariant(shape: Shape, chunks: list[Chunk], bucket: int, decodes: int) -> list[np.ndarray]:
    out = attend(shape, chunks, tokens=bucket, decodes=decodes, blocks=BATCH_INVARIANT_BLOCKS)
    return np.split(out, np.cumsum([len(c.q) for c in chunks]))[: len(chunks)]


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def _bfloat16(x: np.ndarray) -> np.ndarray:
    return x.astype("bfloat16").astype(np.float32)
