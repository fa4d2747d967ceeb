"""A model's work, counted from its tensors' shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp
from jax.typing import DTypeLike

from jkv.models.config import ModelConfig
from jkv.models.params import tensor_names
from jkv.plan.roofline import Work

_LAYERS, _EXPERTS = "model.layers.", ".experts."


def parameters(model: ModelConfig, dtype: DTypeLike) -> int:
    """Of the whole model."""
    return sum(math.prod(shape) for shape in tensor_names(model, dtype).values())


def work_of(model: ModelConfig, dtype: DTypeLike, *, chips: int, kv_bytes: int, host_kv_bytes: int) -> Work:
    """What its steps have to do; the bytes as in `Work`. Vectors (norms, biases) count as nothing."""
    in_layers = {
        name: math.prod(shape)
        for name, shape in tensor_names(model, dtype).items()
        if name.startswith(_LAYERS) and len(shape) > 1
    }
    return Work(
        chips=chips,
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        head_dim=model.head_dim,
        windows=model.windows,
        layer_weights=_sum(in_layers, experts=False),
        expert_weights=_sum(in_layers, experts=True),
        experts=0 if model.experts is None else model.experts.count,
        experts_per_token=0 if model.experts is None else model.experts.per_token,
        head_weights=model.vocab_size * model.hidden_size,
        weight_bytes=jnp.dtype(dtype).itemsize,
        kv_bytes=kv_bytes,
        host_kv_bytes=host_kv_bytes,
    )


def _sum(weights: Mapping[str, int], *, experts: bool) -> int:
    return sum(count for name, count in weights.items() if (_EXPERTS in name) == experts)
