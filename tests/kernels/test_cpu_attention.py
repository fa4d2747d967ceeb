"""The kernel that CPUs have, with the shapes and steps that the one in XLA is tested with."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.kernels import cpu_attention, cpu_library
from tests.kernels.ragged import BUCKET, Shape, assert_close, attend, random_chunks, steps
from tests.kernels.test_xla_attention import SHAPES as _SHARED

pytestmark = pytest.mark.skipif(not cpu_library.available(), reason="no C++ compiler")

SHAPES = [
    *_SHARED,
    Shape(heads=8, kv_heads=1, head_dim=128, page_size=16, soft_cap=20.0),
    Shape(heads=7, kv_heads=1, head_dim=96, page_size=32),
    Shape(heads=2, kv_heads=2, head_dim=256, page_size=64, window=90),
    Shape(heads=5, kv_heads=1, head_dim=80, page_size=128, kv_dtype="int8"),
    # Logits that are far past the cap.
    Shape(heads=2, kv_heads=1, head_dim=16, page_size=64, soft_cap=0.01),
]


def _kernel(*args: Any, blocks: None, **options: Any) -> jax.Array:
    return cpu_attention.paged_attention(*args, **options)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=20, deadline=None)
@given(step=steps(), shared_pages=st.sampled_from([0, 3]), seed=st.integers(0, 2**32 - 1))
def test_equals_float64_whatever_lies_outside_the_rows_in_use(
    shape: Shape, step: tuple[list[tuple[int, int]], int], shared_pages: int, seed: int
) -> None:
    sequences, decodes = step
    chunks = random_chunks(shape, np.random.default_rng(seed), sequences, shared_pages)
    out = attend(shape, chunks, tokens=BUCKET, decodes=decodes, blocks=None, kernel=_kernel)
    assert np.isfinite(out).all()
    assert_close(out, shape, chunks)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_a_decode_s_bits_do_not_depend_on_its_neighbours(shape: Shape) -> None:
    lengths = [(700, 1), (3, 1), (256, 1), (257, 1)]
    chunks = random_chunks(shape, np.random.default_rng(0), lengths)

    def run(which: list[int]) -> np.ndarray:
        some = [chunks[i] for i in which]
        return attend(shape, some, tokens=BUCKET, decodes=len(some), blocks=None, kernel=_kernel)

    together = run([0, 1, 2, 3])
    for i in range(len(chunks)):
        np.testing.assert_array_equal(run([i])[0], together[i])


@pytest.mark.full
@pytest.mark.skipif(platform.machine() != "x86_64", reason="its vectors have one width")
@pytest.mark.parametrize("without", ["avx512f", "avx"])
def test_processors_with_narrower_vectors(without: str, tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or "c++"
    environment = {**os.environ, "JKV_HOME": str(tmp_path), "CXX": f"{compiler} -mno-{without}"}
    tests = [__file__, str(Path(__file__).with_name("test_cpu_product.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "float64", *tests]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert "skipped" not in run.stdout
