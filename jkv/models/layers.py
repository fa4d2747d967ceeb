"""The pieces that decoder layers are made of.

Weights keep Hugging Face's `[out, in]` orientation: nothing is transposed at load, and on CPU YNNPACK
then gives a product's rows the same bits for any number of rows from two up (see `product`).
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jkv.kernels.cpu_product import PanelWeight, panel_product
from jkv.models.config import Activation, ModelConfig

# How rows are multiplied by a weight that is not in panels: as XLA likes, or with the weight on the left.
DenseProduct = Literal["xla", "weights_first"]


class Linear(nnx.Module):
    """`[T, in] -> [T, out]` with a weight of `[out, in]`, which a state may have in panels."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.zeros((outputs, inputs), dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None

    def __call__(self, x: jax.Array, *, dense: DenseProduct) -> jax.Array:
        y = product(x, self.weight.get_value(), dense=dense)
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """`rms_norm` with its weight."""

    def __init__(self, size: int, config: ModelConfig, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps, self.offset = config.rms_norm_eps, config.norm_offset

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps, offset=self.offset)


class MLP(nnx.Module):
    """Gated feed-forward."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(size, inner, bias=bias, dtype=dtype)
        self.up_proj = Linear(size, inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, size, bias=bias, dtype=dtype)
        self.activation: Activation = config.activation

    def __call__(self, x: jax.Array, *, dense: DenseProduct) -> jax.Array:
        gate = self.gate_proj(x, dense=dense)
        inner = activate(gate, self.activation) * self.up_proj(x, dense=dense)
        return self.down_proj(inner, dense=dense)


def product(
    x: jax.Array, weight: jax.Array | PanelWeight, *, dense: DenseProduct, dtype: DTypeLike | None = None
) -> jax.Array:
    """`[T, in] x [out, in] -> [T, out]`, in x's dtype unless `dtype` is given, with panels in float32.

    XLA:CPU first copies the right operand of a product into another order, which for few rows costs as much
    as the product itself. "weights_first" makes that operand `x`; the rows' bits are then not those of other
    products.
    """
    if isinstance(weight, PanelWeight):
        return panel_product(x, weight)
    if dense == "xla":
        return jnp.einsum("ti,oi->to", x, weight, preferred_element_type=dtype)
    # Without the barrier XLA would turn the transposed product back into the other one.
    return lax.optimization_barrier(jnp.einsum("oi,ti->ot", weight, x, preferred_element_type=dtype)).T


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, offset: bool) -> jax.Array:
    """Root-mean-square norm over the last axis (arXiv:1910.07467), in float32 up to the weight. With `offset`
    it multiplies by 1 + weight, in float32 too: as transformers does in either case.
    """
    wide = x.astype(jnp.float32)
    scaled = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if offset:
        return (scaled * (1 + weight.astype(jnp.float32))).astype(x.dtype)
    return scaled.astype(x.dtype) * weight


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """The gate's activation; GELU's tanh approximation (arXiv:1606.08415) in float32."""
    if activation == "silu":
        return jax.nn.silu(x)
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)
