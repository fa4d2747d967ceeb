"""The two halves of a step: tokens through the layers into hidden states, and hidden states into logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jkv.kernels.batch import StepBatch
from jkv.kernels.cpu_product import PanelWeight
from jkv.kernels.kv_pool import KvArrays
from jkv.kernels.mesh import whole
from jkv.models.config import ModelConfig
from jkv.models.decoder import LayerContext, LayerKind, StepShape, layer_context, layer_kinds
from jkv.models.layers import DenseProduct, product, rms_norm
from jkv.models.params import Params, layer_definition

_Carry = tuple[jax.Array, KvArrays[jax.Array]]


def forward(
    config: ModelConfig,
    dtype: DTypeLike,
    shape: StepShape,
    params: Params,
    pool: KvArrays[jax.Array],
    last_tokens: jax.Array,
    batch: StepBatch[jax.Array],
) -> tuple[jax.Array, KvArrays[jax.Array]]:
    """Runs one ragged step.

    Args:
        pool: the KV pool, to be donated.
        last_tokens: `[slots]` int32, the newest token of each slot, for decodes that the host has not read
        yet.

    Returns:
        Normed hidden states of `batch.sample_rows`, `[S, hidden]`, and the pool with the step's K and V
        written.
    """
    definition, _ = layer_definition(config, dtype)
    ids = jnp.where(batch.token_ids < 0, last_tokens[-1 - batch.token_ids], batch.token_ids)
    x = whole(_embedded(params.embed, ids).astype(dtype), shape.attention.mesh)
    if config.scale_embeddings:
        x = x * jnp.asarray(config.hidden_size**0.5, dtype)  # the factor rounded first, as transformers does
    context, kinds = layer_context(config, batch), layer_kinds(config)
    if shape.unroll_layers:
        # Jitted so that the layers share one trace; XLA inlines them again.
        layer_fn = jax.jit(partial(_layer, definition, shape))
        for i, state in enumerate(params.layers):
            x, pool = layer_fn(state, jax.tree.map(lambda n, i=i: n[i], kinds), x, pool, context)
    else:

        def body(
            carry: tuple[jax.Array, KvArrays[jax.Array]], layer: Any
        ) -> tuple[tuple[jax.Array, KvArrays[jax.Array]], None]:
            (state, kind), (x, pool) = layer, carry
            return _layer(definition, shape, state, kind, x, pool, context), None

        (x, pool), _ = lax.scan(body, (x, pool), (params.layers, kinds))
    return rms_norm(x[batch.sample_rows], params.norm, config.rms_norm_eps, offset=config.norm_offset), pool


def logits(config: ModelConfig, params: Params, hidden: jax.Array, *, dense: DenseProduct) -> jax.Array:
    """`[S, hidden]` to float32 `[S, vocab]`; `dense` as in `product`."""
    head = params.embed if params.head is None else params.head
    scores = product(hidden, head, dense=dense, dtype=jnp.float32)
    cap = config.final_soft_cap
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def _embedded(embed: jax.Array | PanelWeight, ids: jax.Array) -> jax.Array:
    return embed.rows(ids) if isinstance(embed, PanelWeight) else embed[ids]


def _layer(
    definition: nnx.GraphDef,
    shape: StepShape,
    state: Any,
    kind: LayerKind,
    x: jax.Array,
    pool: KvArrays[jax.Array],
    context: LayerContext,
) -> tuple[jax.Array, KvArrays[jax.Array]]:
    return nnx.merge(definition, state)(x, pool, kind, context, shape)
