"""The GPU's kernels, interpreted on CPU."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.triton import lowering as triton_lowering
from jaxlib.mlir import ir

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.kernels.batch import StepBatch
from jkv.kernels.gpu_attention import paged_attention
from jkv.kernels.gpu_blocks import GpuBlocks, Tiles, power_above
from jkv.kernels.kv_pool import PoolShape
from jkv.kernels.xla_attention import AttentionBlocks
from tests.kernels.ragged import BUCKET, Chunk, Shape, assert_close, attend, random_chunks, steps

interpreted = partial(paged_attention, interpret=True)

SHAPES = [
    Shape(heads=9, kv_heads=3, head_dim=64, page_size=16),
    Shape(heads=4, kv_heads=4, head_dim=16, page_size=8, window=5, kv_dtype="bfloat16"),
    Shape(heads=4, kv_heads=1, head_dim=96, page_size=64, window=70, kv_dtype="int8"),
    Shape(heads=2, kv_heads=1, head_dim=256, page_size=256, soft_cap=5),
    Shape(heads=20, kv_heads=1, head_dim=128, page_size=32, window=130, soft_cap=30, kv_dtype="bfloat16"),
]
PAGE_SIZES = [16, 256, *(pytest.param(n, marks=pytest.mark.full) for n in (32, 64, 128))]


def blocks(shape: Shape, *, one_path: bool = False, keys: int = 64, rows: int = 32) -> GpuBlocks:
    """Small, so that a thousand keys are many blocks and splits, shared by few programs."""
    return GpuBlocks(
        decode=Tiles(rows=power_above(shape.heads // shape.kv_heads), keys=keys, warps=4, stages=2),
        prefill=Tiles(rows=rows, keys=keys, warps=4, stages=2),
        programs=5,
        least_split=2 * keys,
        one_path=one_path,
    )


@pytest.mark.parametrize(
    ("shape", "one_path"),
    [(s, False) for s in SHAPES]
    + [(SHAPES[0], True)]
    + [pytest.param(s, True, marks=pytest.mark.full) for s in SHAPES[1:]],
    ids=str,
)
@settings(max_examples=12, deadline=None)
@given(step=steps(), shared_pages=st.sampled_from([0, 3]), seed=st.integers(0, 2**32 - 1))
def test_equals_float64_whatever_lies_outside_the_rows_in_use(
    shape: Shape, one_path: bool, step: tuple[list[tuple[int, int]], int], shared_pages: int, seed: int
) -> None:
    sequences, decodes = step
    chunks = random_chunks(shape, np.random.default_rng(seed), sequences, shared_pages)
    out = _attend(shape, chunks, decodes, one_path=one_path)
    assert np.isfinite(out).all()
    assert_close(out, shape, chunks)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages_of_every_size(page_size: int) -> None:
    shape = Shape(heads=4, kv_heads=2, head_dim=64, page_size=page_size, kv_dtype="int8")
    chunks = random_chunks(shape, np.random.default_rng(1), [(1000, 1), (257, 1), (300, 33), (30, 29)])
    out = _attend(shape, chunks, 2)
    assert_close(out, shape, chunks)


def test_a_page_may_lie_in_a_sequence_more_than_once() -> None:
    shape = SHAPES[0]
    rng = np.random.default_rng(2)
    (chunk,) = random_chunks(shape, rng, [(200, 20)])
    order = rng.integers(0, 3, len(chunk.pages))
    rows = (order[:, None] * shape.page_size + np.arange(shape.page_size)).reshape(-1)[: chunk.kv_len]
    again = Chunk(pages=chunk.pages[order], keys=chunk.keys[rows], values=chunk.values[rows], q=chunk.q)
    last = again.split(19, 20)
    out = _attend(shape, [last, again], 1)
    assert_close(out, shape, [last, again])


@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_equals_the_reference_in_bfloat16(shape: Shape) -> None:
    chunks = random_chunks(shape, np.random.default_rng(3), [(700, 1), (64, 1), (300, 17), (20, 20)])
    out = _attend(shape, chunks, 2, q_dtype="bfloat16")
    want = attend(shape, chunks, tokens=BUCKET, decodes=2, blocks=AttentionBlocks(), q_dtype="bfloat16")
    # The weights of the values are rounded to bfloat16 as well.
    np.testing.assert_allclose(out[:39], want[:39], rtol=0, atol=2e-2)


def test_on_one_path_bits_do_not_depend_on_how_a_sequence_is_cut_up() -> None:
    shape = Shape(heads=4, kv_heads=2, head_dim=64, page_size=16)
    whole, other = random_chunks(shape, np.random.default_rng(4), [(300, 60), (77, 3)])
    alone = _attend(shape, [whole], 0, one_path=True)[:60]
    for start, stop in ((0, 1), (59, 60), (13, 14), (5, 40), (17, 59)):
        decodes = int(stop - start == 1)
        rows = _attend(shape, [whole.split(start, stop), other], decodes, one_path=True)[: stop - start]
        assert rows.tobytes() == alone[start:stop].tobytes()


@pytest.mark.parametrize(
    ("heads", "head_dim", "named"), [(1, 288, "head_dim 288"), (129, 16, "129 query heads")]
)
def test_heads_that_no_tile_holds_are_refused_by_name(heads: int, head_dim: int, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        _traced(heads, _pool(head_dim=head_dim, dtype="float32"))


def test_an_int8_pool_that_has_no_offsets_is_refused() -> None:
    row_bytes = 16 * 2 * 64
    pages = 2**31 // row_bytes
    _traced(1, _pool(pages=pages, dtype="int8"))
    _traced(1, _pool(pages=2 * pages + 1, dtype="int8"))
    with pytest.raises(ConfigError, match=r"--l1-gib.*2 GiB"):
        _traced(1, _pool(pages=pages + 1, dtype="int8"))


def test_a_pool_of_more_than_4_gib_has_64_bit_offsets() -> None:
    """In what Triton compiles: pointers to the pool's elements, and the type of what is added to them."""
    page = 16 * 2 * 64
    for dtype, name, pages, offsets in (
        ("bfloat16", "bf16", 2**31 // page, "i32"),
        ("bfloat16", "bf16", 2**31 // page + 1, "i64"),
        ("int8", "i8", 2**31 // page, "i32"),
        ("int8", "i8", 2**32 // page + 1, "i64"),
    ):
        text = "".join(_triton(_pool(pages=pages, dtype=dtype)))
        assert set(
            re.findall(rf"tt.addptr .*: tensor<64x64x!tt.ptr<{name}>>, tensor<64x64x(\w+)>", text)
        ) == {offsets}


def _triton(pool: PoolShape) -> list[str]:
    """The kernels as Triton gets them."""
    lowered = _traced(1, pool).lower(lowering_platforms=("cuda",))
    texts: list[str] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.custom_call":
            with triton_lowering._new_ir_context() as context:
                config: Any = op.attributes["mhlo.backend_config"]
                texts.append(str(ir.Module.parse(config["ir"].value_bytes, context)))
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(visit)
    return texts


def _attend(
    shape: Shape, chunks: list[Chunk], decodes: int, *, one_path: bool = False, q_dtype: str = "float32"
) -> np.ndarray:
    return attend(
        shape,
        chunks,
        tokens=BUCKET,
        decodes=decodes,
        blocks=blocks(shape, one_path=one_path),
        kernel=interpreted,
        q_dtype=q_dtype,
    )


def _pool(*, dtype: str, head_dim: int = 64, pages: int = 4) -> PoolShape:
    return PoolShape(
        layers=1, pages=pages, page_size=16, kv_heads=1, head_dim=head_dim, dtype=jnp.dtype(dtype)
    )


def _traced(heads: int, pool: PoolShape) -> Any:
    """The kernels for a pool that need not exist."""
    shape = Shape(heads=1, kv_heads=1, head_dim=pool.head_dim, page_size=pool.page_size)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    run = partial(
        paged_attention, pages=pool.pages, scale=1, soft_cap=None, blocks=blocks(shape), interpret=False
    )
    return jax.jit(lambda q, kv, layer, batch, window: run(q, kv, layer, batch=batch, window=window)).trace(
        jax.ShapeDtypeStruct((2, heads, pool.head_dim), jnp.float32),
        pool.abstract_pool(),
        scalar,
        StepBatch.abstract(2, 2, 4, 2),
        scalar,
    )
