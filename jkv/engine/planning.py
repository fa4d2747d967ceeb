"""From a configuration and a model to the plan of programs that an engine has on a platform."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import jax

from jkv import __version__
from jkv.config import ServeConfig
from jkv.engine.programs import Platform, ProgramPlan, table_width
from jkv.errors import ConfigError
from jkv.kernels import cpu_library
from jkv.kernels.gpu_blocks import GpuChip
from jkv.kernels.kv_pool import PoolShape, stored_dtype
from jkv.kernels.tpu_blocks import TpuChip
from jkv.models.config import ModelConfig
from jkv.models.params import panel_encodings
from jkv.models.sharding import check_experts, check_tp, device_mesh
from jkv.models.source import TensorSource


def plan_for(
    config: ServeConfig,
    model: ModelConfig,
    platform: Platform,
    devices: Sequence[Any] = (),
    source: TensorSource | None = None,
) -> ProgramPlan:
    """The plan with one page of L1, whose size it helps to decide; see `with_pages`. The first `--tp` of
    `devices` share the model; on CPU one need not be given. Without a `source` its weights are float32's.

    Raises:
        ConfigError: a flag that does not fit the model or the device, or fewer devices than `--tp`.
        UnsupportedModelError: heads that the device's attention cannot take.
    """
    check_tp(config.tp, model)
    if config.ep:
        check_experts(config.tp, model)
    return ProgramPlan(
        platform=platform,
        config=model,
        dtype=compute_dtype(config, platform),
        pool=PoolShape(
            layers=model.num_layers,
            pages=1,
            page_size=config.page_size,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=stored_dtype(kv_dtype(config, platform), platform),
            tp=config.tp,
        ),
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=max(config.max_batched_tokens, config.max_num_seqs),
        table_width=table_width(max_model_len(config, model), config.page_size),
        batch_invariant=config.batch_invariant,
        tpu=TpuChip.of(devices[0]) if platform == "tpu" else None,
        gpu=GpuChip.of(devices[0]) if platform == "gpu" else None,
        cpu_kernels=_cpu_kernels(config, platform),
        panels=panel_encodings(model, source) if has_panels(config, platform) else None,
        mesh=device_mesh(config.tp, devices),
        whole_experts=config.ep,
    )


def has_panels(config: ServeConfig, platform: Platform) -> bool:
    """Whether weights are multiplied in panels: CPUs' kernel takes whole ones, of float32's values."""
    whole = config.tp == 1 and compute_dtype(config, platform) == "float32"
    return whole and _cpu_kernels(config, platform)


def with_pages(plan: ProgramPlan, pages: int) -> ProgramPlan:
    """The plan with as many pages of L1."""
    return dataclasses.replace(plan, pool=dataclasses.replace(plan.pool, pages=pages))


def _cpu_kernels(config: ServeConfig, platform: Platform) -> bool:
    return platform == "cpu" and not config.batch_invariant and cpu_library.available()


def compute_dtype(config: ServeConfig, platform: Platform) -> str:
    """Of weights and activations: what `--dtype` says, or suits the platform."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if platform == "cpu" else "bfloat16"


def kv_dtype(config: ServeConfig, platform: Platform) -> str:
    """Of the KV cache: what `--kv-dtype` says, or `compute_dtype`."""
    return compute_dtype(config, platform) if config.kv_dtype == "auto" else config.kv_dtype


def numerics(config: ServeConfig) -> str:
    """What pages' bits depend on beside the model, where bits are promised: pages made on other devices, by
    another jkv or compiler, or with sums over another number of devices are right, but not equal to those
    made here.
    """
    if not config.batch_invariant:
        return ""
    jaxlib = importlib.metadata.version("jaxlib")
    return f"batch-invariant {jax.devices()[0].device_kind} jkv-{__version__} jaxlib-{jaxlib} tp-{config.tp}"


def max_model_len(config: ServeConfig, model: ModelConfig) -> int:
    """The longest sequence in tokens.

    Raises:
        ConfigError: `--max-model-len` is more than the model's context length.
    """
    if config.max_model_len is None:
        return model.max_position
    if config.max_model_len > model.max_position:
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: the model's context length is {model.max_position}"
        )
    return config.max_model_len
