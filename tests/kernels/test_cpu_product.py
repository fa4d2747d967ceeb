from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.kernels import cpu_library
from jkv.kernels.cpu_product import few_rows

pytestmark = pytest.mark.skipif(not cpu_library.available(), reason="no C++ compiler")


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 70),
    # Whole vectors, what is left of one, and more than stays in the first cache.
    inputs=st.sampled_from([1, 15, 16, 33, 576, 768, 769, 1536]),
    outputs=st.sampled_from([1, 2, 3, 47, 48, 100, 193]),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_float64(rows: int, inputs: int, outputs: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, inputs), dtype=np.float32)
    weight = rng.standard_normal((outputs, inputs), dtype=np.float32)
    want = x.astype(np.float64) @ weight.T.astype(np.float64)
    got = few_rows(jnp.asarray(x), jnp.asarray(weight))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * inputs**0.5 + 1e-6)


def test_a_row_s_nan_stays_in_its_row() -> None:
    x = np.ones((9, 64), np.float32)
    x[3, 5] = np.nan
    out = np.asarray(few_rows(jnp.asarray(x), jnp.ones((50, 64), jnp.float32)))
    assert np.isnan(out[3]).all()
    assert (np.delete(out, 3, axis=0) == 64).all()


def test_a_row_s_bits_do_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 1541), dtype=np.float32)
    weight = jnp.asarray(rng.standard_normal((97, 1541), dtype=np.float32))
    together = np.asarray(few_rows(jnp.asarray(x), weight))
    for rows in (1, 2, 7, 8, 11):
        np.testing.assert_array_equal(few_rows(jnp.asarray(x[:rows]), weight), together[:rows])
