from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.kernels.batch import StepBatch
from jkv.kernels.kv_pool import (
    KvArrays,
    PoolShape,
    from_stored,
    load_kv,
    quantize,
    scatter_quantized,
    stored_dtype,
    to_stored,
    write_kv,
    write_quantized_runs,
)

_LAYERS, _PAGES, _PAGE_SIZE, _HEADS, _DIM = 3, 4, 8, 2, 16
_DTYPES = ["float32", "float16", "bfloat16", "uint16"]


on_one_and_on_many_tokens = pytest.mark.parametrize(
    "targets",
    [
        [(2, 5)],
        [(None, 5)],
        [(None, 0), (1, 7), (3, 0), (0, 3), (None, 7), (1, 6)],
        [(None, 0), (None, 1)],
        [(1, 3), (1, 4), (1, 5), (None, 6), (1, 7), (2, 0), (2, 1), (0, 7), (0, 6), (3, 2), (2, 3)],
    ],
    ids=["one", "one masked", "some masked", "all masked", "runs"],
)
in_every_layer = pytest.mark.parametrize("layer", range(_LAYERS))


@pytest.mark.parametrize("dtype", _DTYPES)
@on_one_and_on_many_tokens
@in_every_layer
def test_writes_its_rows_and_no_others(dtype: str, targets: list[tuple[int | None, int]], layer: int) -> None:
    shape = _shape(dtype)
    rng = np.random.default_rng(0)
    before = to_stored(jnp.asarray(rng.normal(size=shape.shape), jnp.float32), shape.dtype)
    keys, values = (jnp.asarray(rng.normal(size=(len(targets), _HEADS, _DIM)), jnp.float32) for _ in range(2))
    # Beyond the layer's pages lie the next layer's: a mask that failed would show there.
    batch = _writes([(_PAGES if page is None else page, offset) for page, offset in targets])

    want = np.array(before)
    stored = to_stored(jnp.stack([keys, values], axis=2), shape.dtype)
    for row, (page, offset) in zip(np.asarray(stored), targets, strict=True):
        if page is not None:
            want[layer * _PAGES + page, offset] = row.reshape(-1)

    run = jax.jit(partial(write_kv, pages=_PAGES))
    pool = KvArrays(values=before, scales=None)
    after = run(pool, jnp.int32(layer), keys=keys, values=values, batch=batch)
    assert after.scales is None
    assert after.values.dtype == before.dtype
    assert np.array(after.values).tobytes() == want.tobytes()


@on_one_and_on_many_tokens
@in_every_layer
def test_int8_is_written_with_its_scales_and_read_back(
    targets: list[tuple[int | None, int]], layer: int
) -> None:
    shape = _shape("int8")
    rng = np.random.default_rng(0)
    before = jax.tree.map(
        lambda x: jnp.asarray(rng.integers(-100, 100, x.shape), x.dtype), shape.abstract_pool()
    )
    keys, values = (jnp.asarray(rng.normal(size=(len(targets), _HEADS, _DIM)), jnp.float32) for _ in range(2))
    batch = _writes([(_PAGES if page is None else page, offset) for page, offset in targets])

    every_row = jnp.arange(_LAYERS * _PAGES)
    want = np.array(load_kv(before, every_row)).reshape(_LAYERS, _PAGES, _PAGE_SIZE, -1)
    steps, scales = quantize(jnp.stack([keys, values], axis=2))
    for row, (page, offset) in zip(np.asarray(steps * scales[..., None]), targets, strict=True):
        if page is not None:
            want[layer, page, offset] = row.reshape(-1)

    run = jax.jit(partial(write_kv, pages=_PAGES))
    after = run(before, jnp.int32(layer), keys=keys, values=values, batch=batch)
    assert after.values.dtype == jnp.int8
    assert np.array(load_kv(after, every_row)).tobytes() == want.tobytes()

    pages, offsets = jnp.asarray(batch.write_pages), jnp.asarray(batch.write_offsets)
    new = [x.reshape(len(targets), -1) for x in (steps, scales)]
    assert before.scales is not None
    for write in (scatter_quantized, write_quantized_runs):
        written = jax.jit(write)(
            before.values, before.scales, layer * _PAGES + pages, pages < _PAGES, *new, offsets
        )
        assert np.array(load_kv(written, every_row)).tobytes() == want.tobytes(), write


def test_int8_is_off_by_half_a_step_at_most_and_keeps_zeros_and_signs() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(50, 3, 64)) * np.exp(rng.normal(scale=5, size=(50, 3, 1)))
    rows[7, 1] = 0
    steps, scales = map(np.asarray, quantize(jnp.asarray(rows, jnp.float32)))
    largest = np.abs(rows).max(axis=-1)
    np.testing.assert_allclose(scales, largest / 127, rtol=1e-6)
    assert (np.abs(steps * scales[..., None] - rows) <= 0.5001 * scales[..., None]).all()
    assert (np.abs(steps).max(axis=-1) == np.where(largest > 0, 127, 0)).all()
    negated, same = map(np.asarray, quantize(jnp.asarray(-rows, jnp.float32)))
    assert (negated == -steps).all()
    assert (same == scales).all()


@pytest.mark.parametrize("tokens", [1, 2, 16])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", stored_dtype("bfloat16", "cpu").name])
def test_a_donated_pool_is_written_in_place(dtype: str, tokens: int) -> None:
    shape = _shape(dtype, pages=4096)
    pool_bytes = shape.page_bytes * shape.pages
    rows = jax.ShapeDtypeStruct((tokens, _HEADS, _DIM), jnp.float32)
    run = jax.jit(partial(write_kv, pages=shape.pages), donate_argnums=0)
    lowered = run.lower(
        shape.abstract_pool(),
        jax.ShapeDtypeStruct((), jnp.int32),
        keys=rows,
        values=rows,
        batch=StepBatch.abstract(tokens, 1, 1, 1),
    )
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 100


def test_bfloat16_is_stored_as_its_bits_on_cpu_only() -> None:
    assert stored_dtype("bfloat16", "cpu") == jnp.uint16
    assert stored_dtype("bfloat16", "tpu") == jnp.bfloat16
    assert stored_dtype("float32", "cpu") == jnp.float32
    x = jnp.asarray([1.0, -2.5, 1e-30, jnp.inf, 1 / 3], jnp.float32)
    rounded = x.astype(jnp.bfloat16)
    stored = to_stored(x, jnp.uint16)
    assert np.asarray(stored).tobytes() == np.asarray(rounded).tobytes()
    assert from_stored(stored).dtype == jnp.bfloat16
    assert np.asarray(from_stored(stored)).tobytes() == np.asarray(rounded).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_page_bytes_are_those_of_the_arrays(dtype: str) -> None:
    shape = _shape(dtype)
    pool, page = (
        sum(jnp.zeros(x.shape, x.dtype).nbytes for x in jax.tree.leaves(abstract))
        for abstract in (shape.abstract_pool(), shape.abstract_page())
    )
    assert shape.page_bytes == page == pool // _PAGES
    scales = 4 * _LAYERS * 2 * _HEADS * _PAGE_SIZE if dtype == "int8" else 0
    item = jnp.dtype(dtype).itemsize
    assert shape.page_bytes == _LAYERS * _PAGE_SIZE * 2 * _HEADS * _DIM * item + scales


def _shape(dtype: str, pages: int = _PAGES) -> PoolShape:
    return PoolShape(
        layers=_LAYERS,
        pages=pages,
        page_size=_PAGE_SIZE,
        kv_heads=_HEADS,
        head_dim=_DIM,
        dtype=jnp.dtype(dtype),
    )


def _writes(targets: list[tuple[int, int]]) -> StepBatch[np.ndarray]:
    batch = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), StepBatch.abstract(len(targets), 1, 1, 1))
    batch.write_pages[:], batch.write_offsets[:] = np.transpose(targets)
    return batch
