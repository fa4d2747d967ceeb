"""How many devices can share a model, and what of its weights each of them gets (Shoeybi et al.,
arXiv:1909.08053): q, k, v, gate and up by their outputs, o and down by their inputs, so that a layer needs
two sums over the devices; embedding and head by vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jkv.errors import ConfigError
from jkv.kernels.mesh import TP, WHOLE, DeviceMesh, tp_of
from jkv.models.config import ModelConfig

_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUT = ("o_proj", "down_proj")
_BY_VOCABULARY = ("embed_tokens", "lm_head")


def possible_tp(config: ModelConfig) -> list[int]:
    """How many devices can have whole heads each."""
    return [n for n in range(1, config.num_heads + 1) if _shares_heads(n, config)]


def check_tp(tp: int, config: ModelConfig) -> None:
    """Raises ConfigError where `tp` devices cannot have whole heads each."""
    allowed = possible_tp(config)
    if tp not in allowed:
        raise ConfigError(
            f"--tp {tp}: the model has {config.num_heads} heads and {config.num_kv_heads} KV heads; "
            f"allowed: {', '.join(map(str, allowed))}"
        )


def device_mesh(tp: int, devices: Sequence[Any]) -> Mesh | None:
    """The first `tp` of these jax devices, or None for one.

    Raises:
        ConfigError: there are fewer.
    """
    if tp == 1:
        return None
    if len(devices) < tp:
        kind = f" ({devices[0].device_kind})" if devices else ""
        raise ConfigError(f"--tp {tp}: needs as many devices, and there are {len(devices)}{kind}")
    return Mesh(np.asarray(devices[:tp]), (TP,))


def widened(config: ModelConfig, tp: int) -> ModelConfig:
    """The model as its weights are on `tp` devices: no fewer KV heads than devices, each next to its copies,
    and an MLP padded with zeros to a width that `tp` divides. It computes the same.
    """
    return dataclasses.replace(
        config,
        num_kv_heads=max(config.num_kv_heads, tp),
        intermediate_size=-(-config.intermediate_size // tp) * tp,
    )


def widened_tensor(name: str, array: np.ndarray, config: ModelConfig, tp: int) -> np.ndarray:
    """A checkpoint's tensor as `widened` has it."""
    module = name.split(".")[-2]
    if module in ("k_proj", "v_proj") and tp > config.num_kv_heads:
        heads = array.reshape(config.num_kv_heads, config.head_dim, *array.shape[1:])
        return np.repeat(heads, tp // config.num_kv_heads, axis=0).reshape(-1, *array.shape[1:])
    missing = -config.intermediate_size % tp
    if not missing or module not in ("gate_proj", "up_proj", "down_proj"):
        return array
    axis = 1 if module == "down_proj" else 0
    if array.ndim <= axis:
        return array  # the bias of down_proj
    return np.pad(array, [(0, missing if i == axis else 0) for i in range(array.ndim)])


def check_experts(tp: int, config: ModelConfig) -> None:
    """Raises ConfigError where `tp` devices cannot have as many whole experts each."""
    if config.experts is None:
        raise ConfigError("--ep: the model has no experts")
    if tp == 1 or config.experts.count % tp:
        raise ConfigError(f"--ep: --tp {tp} must be 2 or more and divide {config.experts.count} experts")


def expert_partition(module: str, *, whole: bool) -> P:
    """How the weights of one projection, `[experts, in, out]`, lie over the devices."""
    if whole:
        return P(TP)
    return P(None, None, TP) if module in _BY_OUTPUT else P(None, TP)


def partition(name: str, shape: tuple[int, ...], tp: int, *, whole_experts: bool = False) -> P:
    """How a tensor of that name and widened shape lies over the devices."""
    *_, module, kind = name.split(".")
    if ".experts." in name:
        return expert_partition(module, whole=whole_experts)
    if module in _BY_OUTPUT:
        return P(TP)
    if module in _BY_INPUT and kind == "weight":
        return P(None, TP)
    if module in _BY_VOCABULARY and shape[0] % tp == 0:
        return P(TP)
    return WHOLE


def tensor_sharding(
    name: str,
    shape: tuple[int, ...],
    mesh: DeviceMesh | None,
    *,
    stacked: bool = False,
    whole_experts: bool = False,
) -> Any:
    """Where a tensor goes, None without a mesh. `stacked` ones have an axis of layers before those of
    `shape`. With `whole_experts` a device has some of a mixture's, else a part of each.
    """
    if mesh is None:
        return None
    spec = partition(name, shape, tp_of(mesh), whole_experts=whole_experts)
    return NamedSharding(mesh, P(None, *spec) if stacked else spec)


def place(array: np.ndarray, sharding: Any) -> jax.Array:
    """Puts a host's array where it belongs, each device's part of it only. Every process of several has it
    and does so on its own: jax.device_put would have them compare it.
    """
    if sharding is None:
        return jax.device_put(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _shares_heads(tp: int, config: ModelConfig) -> bool:
    kv_heads = config.num_kv_heads
    return config.num_heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
