"""The decoder in Flax NNX: Llama, Mistral, Qwen and Gemma differ only by the flags of ModelConfig.

Weights keep Hugging Face's `[out, in]` orientation: nothing is transposed at load, and on CPU YNNPACK
then gives a product's rows the same bits for any number of rows from two up (see `product`).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jkv.kernels.attention import AttentionSpec, attend
from jkv.kernels.batch import StepBatch
from jkv.kernels.kv_pool import KvArrays
from jkv.models.config import Activation, ModelConfig
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

    cos: jax.Array  # [ropes, T, head_dim / 2] float32
    sin: jax.Array
    batch: StepBatch[jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What sets a layer apart beside its weights: int32 scalars, or `[layers]` for all of them."""

    index: jax.Array
    window: jax.Array
    rope: jax.Array  # into LayerContext.cos and sin


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

    def __init__(self, size: int, config: ModelConfig, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps, self.offset = config.rms_norm_eps, config.norm_offset

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps, offset=self.offset)


class Attention(nnx.Module):
    """Grouped-query attention over the paged pool."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, bias=config.qkv_bias, dtype=dtype)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias, dtype=dtype)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias, dtype=dtype)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.o_bias, dtype=dtype)
        self.q_norm = RMSNorm(self.head_dim, config, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config, dtype) if config.qk_norm else None
        self.scale = self.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.soft_cap = config.attention_soft_cap

    def __call__(
        self,
        x: jax.Array,
        pool: KvArrays[jax.Array],
        kind: LayerKind,
        context: LayerContext,
        shape: StepShape,
    ) -> tuple[jax.Array, KvArrays[jax.Array]]:
        first = shape.weights_first
        q = self.q_proj(x, weights_first=first).reshape(-1, self.heads, self.head_dim)
        k = self.k_proj(x, weights_first=first).reshape(-1, self.kv_heads, self.head_dim)
        v = self.v_proj(x, weights_first=first).reshape(-1, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = context.cos[kind.rope], context.sin[kind.rope]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out, pool = attend(
            q,
            k,
            v,
            pool,
            kind.index,
            shape.pages,
            context.batch,
            window=kind.window,
            scale=self.scale,
            soft_cap=self.soft_cap,
            spec=shape.attention,
        )
        return self.o_proj(out.reshape(x.shape[0], -1), weights_first=first), pool


class MLP(nnx.Module):
    """Gated feed-forward."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(size, inner, bias=bias, dtype=dtype)
        self.up_proj = Linear(size, inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, size, bias=bias, dtype=dtype)
        self.activation: Activation = config.activation

    def __call__(self, x: jax.Array, *, weights_first: bool) -> jax.Array:
        gate = self.gate_proj(x, weights_first=weights_first)
        inner = activate(gate, self.activation) * self.up_proj(x, weights_first=weights_first)
        return self.down_proj(inner, weights_first=weights_first)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP with residuals. Attribute names are those of Hugging Face's tensors, so what
    `post_attention_layernorm` norms depends on the family: the MLP's input, or attention's output.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config, dtype)

        self.input_layernorm = norm()
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm() if config.output_norms else None
        self.mlp = MLP(config, dtype)
        self.post_feedforward_layernorm = norm() if config.output_norms else None

    def __call__(
        self,
        x: jax.Array,
        pool: KvArrays[jax.Array],
        kind: LayerKind,
        context: LayerContext,
        shape: StepShape,
    ) -> tuple[jax.Array, KvArrays[jax.Array]]:
        attended, pool = self.self_attn(self.input_layernorm(x), pool, kind, context, shape)
        first = shape.weights_first
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            x = x + attended
            return x + self.mlp(self.post_attention_layernorm(x), weights_first=first), pool
        x = x + self.post_attention_layernorm(attended)
        inner = self.mlp(self.pre_feedforward_layernorm(x), weights_first=first)
        return x + self.post_feedforward_layernorm(inner), pool


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


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of `[T, heads, head_dim]` in the half-split layout (arXiv:2104.09864, as transformers
    lays it out).
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def layer_context(config: ModelConfig, batch: StepBatch[jax.Array]) -> LayerContext:
    """Cosines and sines of a step's positions, under each rope of the model."""
    ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
    frequencies, scales = zip(*(inverse_frequencies(r, config.head_dim) for r in ropes), strict=True)
    per_rope = np.asarray(scales, np.float32)[:, None, None]
    angles = batch.positions.astype(jnp.float32)[None, :, None] * np.stack(frequencies)[:, None, :]
    return LayerContext(cos=jnp.cos(angles) * per_rope, sin=jnp.sin(angles) * per_rope, batch=batch)


def layer_kinds(config: ModelConfig) -> LayerKind:
    """Of all layers. Those without a window see every position an int32 can hold."""
    unlimited = jnp.iinfo(jnp.int32).max
    local = [w is not None and config.local_rope is not None for w in config.windows]
    return LayerKind(
        index=jnp.arange(config.num_layers, dtype=jnp.int32),
        window=jnp.asarray([unlimited if w is None else w for w in config.windows], jnp.int32),
        rope=jnp.asarray(local, jnp.int32),
    )
