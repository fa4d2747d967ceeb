"""The decoder in Flax NNX: Llama, Mistral, Qwen2 and Qwen3 differ only by the flags of ModelConfig.

Weights keep Hugging Face's `[out, in]` orientation: nothing is transposed at load, and on CPU YNNPACK
then gives a product's rows the same bits for any number of rows from two up (see `product`).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jkv.kernels.attention import AttentionSpec, attend
from jkv.kernels.batch import StepBatch
from jkv.kernels.kv_pool import KvArrays
from jkv.models.config import ModelConfig
from jkv.models.rope import inverse_frequencies


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What a compiled step is specialized on beside its arrays' shapes."""

    pages: int
    attention: AttentionSpec
    unroll_layers: bool
    weights_first: bool  # see `product`


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """What every layer of a step reads."""

    cos: jax.Array  # [T, head_dim / 2] float32
    sin: jax.Array
    batch: StepBatch[jax.Array]


class Linear(nnx.Module):
    """`[T, in] -> [T, out]` with a weight of `[out, in]`."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.zeros((outputs, inputs), dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None

    def __call__(self, x: jax.Array, *, weights_first: bool) -> jax.Array:
        y = product(x, self.weight[...], weights_first=weights_first)
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """`rms_norm` with its weight."""

    def __init__(self, size: int, eps: float, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps)


class Attention(nnx.Module):
    """Grouped-query attention over the paged pool."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, bias=config.qkv_bias, dtype=dtype)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias, dtype=dtype)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias, dtype=dtype)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.o_bias, dtype=dtype)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None

    def __call__(
        self,
        x: jax.Array,
        pool: KvArrays[jax.Array],
        layer: jax.Array,
        window: jax.Array,
        context: LayerContext,
        shape: StepShape,
    ) -> tuple[jax.Array, KvArrays[jax.Array]]:
        first = shape.weights_first
        q = self.q_proj(x, weights_first=first).reshape(-1, self.heads, self.head_dim)
        k = self.k_proj(x, weights_first=first).reshape(-1, self.kv_heads, self.head_dim)
        v = self.v_proj(x, weights_first=first).reshape(-1, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, context.cos, context.sin), rotate(k, context.cos, context.sin)
        out, pool = attend(
            q,
            k,
            v,
            pool,
            layer,
            shape.pages,
            context.batch,
            window=window,
            scale=self.head_dim**-0.5,
            soft_cap=None,
            spec=shape.attention,
        )
        return self.o_proj(out.reshape(x.shape[0], -1), weights_first=first), pool


class MLP(nnx.Module):
    """Gated SiLU feed-forward."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(size, inner, bias=bias, dtype=dtype)
        self.up_proj = Linear(size, inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, size, bias=bias, dtype=dtype)

    def __call__(self, x: jax.Array, *, weights_first: bool) -> jax.Array:
        gate = self.gate_proj(x, weights_first=weights_first)
        inner = jax.nn.silu(gate) * self.up_proj(x, weights_first=weights_first)
        return self.down_proj(inner, weights_first=weights_first)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP with residuals. Attribute names are those of Hugging Face's tensors."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype)

    def __call__(
        self,
        x: jax.Array,
        pool: KvArrays[jax.Array],
        layer: jax.Array,
        window: jax.Array,
        context: LayerContext,
        shape: StepShape,
    ) -> tuple[jax.Array, KvArrays[jax.Array]]:
        attended, pool = self.self_attn(self.input_layernorm(x), pool, layer, window, context, shape)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x), weights_first=shape.weights_first), pool


def product(
    x: jax.Array, weight: jax.Array, *, weights_first: bool, dtype: DTypeLike | None = None
) -> jax.Array:
    """`[T, in] x [out, in] -> [T, out]`, in x's dtype unless `dtype` is given.

    XLA:CPU first copies the right operand of a product into another order, which for few rows costs as much
    as the product itself. `weights_first` makes that operand `x`; the rows' bits are then not those of other
    products.
    """
    if not weights_first:
        return jnp.einsum("ti,oi->to", x, weight, preferred_element_type=dtype)
    # Without the barrier XLA would turn the transposed product back into the other one.
    return lax.optimization_barrier(jnp.einsum("oi,ti->ot", weight, x, preferred_element_type=dtype)).T


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis (arXiv:1910.07467), in float32 up to the weight."""
    wide = x.astype(jnp.float32)
    scaled = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return scaled.astype(x.dtype) * weight


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of `[T, heads, head_dim]` in the half-split layout (arXiv:2104.09864, as transformers
    lays it out).
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def layer_context(config: ModelConfig, batch: StepBatch[jax.Array]) -> LayerContext:
    """Cosines and sines of a step's positions."""
    frequencies, scale = inverse_frequencies(config.rope, config.head_dim)
    angles = batch.positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)[None, :]
    return LayerContext(cos=jnp.cos(angles) * scale, sin=jnp.sin(angles) * scale, batch=batch)


def layer_windows(config: ModelConfig) -> list[int]:
    """Each layer's window; layers without one see every position an int32 can hold."""
    return [jnp.iinfo(jnp.int32).max if w is None else w for w in config.windows]
