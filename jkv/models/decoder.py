"""The decoder in Flax NNX: Llama, Mistral, Qwen and Gemma differ only by the fields of ModelConfig."""

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
from jkv.models.config import ModelConfig
from jkv.models.experts import ExpertProduct, SparseMLP
from jkv.models.layers import MLP, DenseProduct, Linear, RMSNorm
from jkv.models.rope import inverse_frequencies


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What a compiled step is specialized on beside its arrays' shapes."""

    pages: int
    attention: AttentionSpec
    unroll_layers: bool
    dense_product: DenseProduct
    expert_product: ExpertProduct
    whole_experts: bool


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """What every layer of a step reads."""

    cos: jax.Array  # [ropes, T, head_dim / 2] float32
    sin: jax.Array
    tokens: jax.Array  # int32 scalar: rows of the step that are no padding
    batch: StepBatch[jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What sets a layer apart beside its weights: int32 scalars, or `[layers]` for all of them."""

    index: jax.Array
    window: jax.Array
    rope: jax.Array  # into LayerContext.cos and sin


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
        dense = shape.dense_product
        q = self.q_proj(x, dense=dense).reshape(-1, self.heads, self.head_dim)
        k = self.k_proj(x, dense=dense).reshape(-1, self.kv_heads, self.head_dim)
        v = self.v_proj(x, dense=dense).reshape(-1, self.kv_heads, self.head_dim)
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
        return self.o_proj(out.reshape(x.shape[0], -1), dense=dense), pool


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
        self.mlp = MLP(config, dtype) if config.experts is None else SparseMLP(config, dtype)
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
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            x = x + attended
            return x + self._feed_forward(self.post_attention_layernorm(x), context, shape), pool
        x = x + self.post_attention_layernorm(attended)
        inner = self._feed_forward(self.pre_feedforward_layernorm(x), context, shape)
        return x + self.post_feedforward_layernorm(inner), pool

    def _feed_forward(self, x: jax.Array, context: LayerContext, shape: StepShape) -> jax.Array:
        dense = shape.dense_product
        if isinstance(self.mlp, MLP):
            return self.mlp(x, dense=dense)
        return self.mlp(
            x,
            context.tokens,
            dense=dense,
            product=shape.expert_product,
            mesh=shape.attention.mesh,
            whole_experts=shape.whole_experts,
        )


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of `[T, heads, head_dim]` in the half-split layout (arXiv:2104.09864, as transformers
    lays it out).
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def layer_context(config: ModelConfig, batch: StepBatch[jax.Array]) -> LayerContext:
    """Cosines and sines of a step's positions, under each rope of the model, and its size."""
    ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
    frequencies, scales = zip(*(inverse_frequencies(r, config.head_dim) for r in ropes), strict=True)
    per_rope = np.asarray(scales, np.float32)[:, None, None]
    angles = batch.positions.astype(jnp.float32)[None, :, None] * np.stack(frequencies)[:, None, :]
    # What a branch returns is not fused into its users: XLA:CPU would compute it for all heads of all layers.
    cos, sin = lax.cond(
        batch.counts[1] > 0,
        lambda: (jnp.cos(angles) * per_rope, jnp.sin(angles) * per_rope),
        lambda: (jnp.zeros_like(angles), jnp.zeros_like(angles)),
    )
    in_use = jnp.arange(batch.q_lens.shape[0]) < batch.counts[1]
    return LayerContext(
        cos=cos,
        sin=sin,
        tokens=jnp.sum(jnp.where(in_use, batch.q_lens, 0)),
        batch=batch,
    )


def layer_kinds(config: ModelConfig) -> LayerKind:
    """Of all layers. Those without a window see every position an int32 can hold."""
    unlimited = jnp.iinfo(jnp.int32).max
    local = [w is not None and config.local_rope is not None for w in config.windows]
    return LayerKind(
        index=jnp.asarray(range(config.num_layers), jnp.int32),
        window=jnp.asarray([unlimited if w is None else w for w in config.windows], jnp.int32),
        rope=jnp.asarray(local, jnp.int32),
    )
