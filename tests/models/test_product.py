"""Either order of a product's operands gives the same values, and XLA keeps the one that was asked for."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.models.layers import DenseProduct, product

_ROWS, _IN, _OUT = 8, 64, 96
_RNG = np.random.default_rng(0)
_X = _RNG.standard_normal((_ROWS, _IN), dtype=np.float32)
_WEIGHT = _RNG.standard_normal((_OUT, _IN), dtype=np.float32)


@pytest.mark.parametrize("dense", ["xla", "weights_first"])
def test_values(dense: DenseProduct) -> None:
    values = product(jnp.asarray(_X), jnp.asarray(_WEIGHT), dense=dense)
    np.testing.assert_allclose(values, _X @ _WEIGHT.T, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dense", ["xla", "weights_first"])
def test_bfloat16_products_can_be_float32(dense: DenseProduct) -> None:
    x, weight = jnp.asarray(_X, jnp.bfloat16), jnp.asarray(_WEIGHT, jnp.bfloat16)
    values = product(x, weight, dense=dense, dtype=jnp.float32)
    assert values.dtype == jnp.float32
    exact = np.asarray(x, np.float32) @ np.asarray(weight, np.float32).T
    np.testing.assert_allclose(values, exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("dense", "operands"),
    [("weights_first", [(_OUT, _IN), (_ROWS, _IN)]), ("xla", [(_ROWS, _IN), (_OUT, _IN)])],
)
def test_xla_keeps_the_order(dense: DenseProduct, operands: list[tuple[int, int]]) -> None:
    lowered = jax.jit(product, static_argnames="dense").lower(_X, _WEIGHT, dense=dense)
    text = lowered.compile().as_text()
    assert text is not None
    (names,) = re.findall(r" dot\(%?([\w.]+), %?([\w.]+)\)", text)
    shapes = [re.search(rf"%?{re.escape(name)} = f32\[(\d+),(\d+)\]", text) for name in names]
    assert [tuple(map(int, shape.groups())) for shape in shapes if shape] == operands
