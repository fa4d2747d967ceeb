"""RopeConfig from a Hugging Face config, in today's dialect and in the one of hub configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.models.config import RopeConfig
from jkv.models.hf_fields import Fields

KINDS = ("default", "linear", "llama3", "yarn")
_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "partial_rotary_factor": 1.0}


def rope_from_hf(fields: Fields, max_position: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    As in transformers, llama3 and yarn take `max_position_embeddings` where
    `original_max_position_embeddings` is absent, and a yarn `factor` of null is the ratio of the two.

    Raises:
        UnsupportedModelError: a kind or a field that jkv does not implement.
        ConfigError: a field of the wrong type, a missing factor, or two dialects that disagree.
    """
    theta = fields.positive_float("rope_theta")
    scaling, prefix = _scaling(fields)
    return _rope(scaling, prefix, theta, max_position)


def ropes_by_layer_type(fields: Fields, max_position: int) -> tuple[RopeConfig, RopeConfig]:
    """Gemma 3's two: of the layers with full attention, and of those with a window.

    `rope_parameters` has an object for each layer type (transformers 5); before, `rope_theta` and
    `rope_scaling` were for full attention and `rope_local_base_freq` for windows.

    Raises:
        UnsupportedModelError, ConfigError: as `rope_from_hf`.
    """
    theta, local = fields.positive_float("rope_theta"), fields.positive_float("rope_local_base_freq")
    parameters, prefix = _scaling(fields)
    if prefix == "rope_scaling.":
        return _rope(parameters, prefix, theta, max_position), RopeConfig(theta=local)
    by_type = Fields(parameters, {}, prefix)
    ropes: list[RopeConfig] = []
    for kind, default in (("full_attention", theta), ("sliding_attention", local)):
        values = by_type.get(kind)
        if not isinstance(values, dict):
            raise ConfigError(f"config field {prefix}{kind}={values!r}: it must be an object")
        ropes.append(_rope(values, f"{prefix}{kind}.", default, max_position))
    by_type.refuse_unread(())
    return ropes[0], ropes[1]


def _rope(scaling: Mapping[str, Any], prefix: str, theta: float, max_position: int) -> RopeConfig:
    rope = Fields(scaling, {**_DEFAULTS, "rope_theta": theta}, prefix)
    kind = _kind(rope, prefix)
    rope.require("partial_rotary_factor", (1.0,))
    values: dict[str, Any] = {"theta": rope.positive_float("rope_theta"), "kind": kind}
    if kind == "linear":
        values["factor"] = rope.positive_float("factor")
    elif kind == "llama3":
        values |= _llama3(rope, max_position)
    elif kind == "yarn":
        values |= _yarn(rope, max_position)
    rope.refuse_unread(())
    return RopeConfig(**values)


def _scaling(fields: Fields) -> tuple[Mapping[str, Any], str]:
    parameters, scaling = fields.get("rope_parameters"), fields.get("rope_scaling")
    name = "rope_parameters" if parameters is not None else "rope_scaling"
    if parameters is not None and scaling is not None and parameters != scaling:
        raise ConfigError(
            f"config fields rope_parameters={parameters!r} and rope_scaling={scaling!r} disagree: "
            "keep one of them"
        )
    chosen = parameters if parameters is not None else scaling
    if chosen is None:
        return {}, f"{name}."
    if not isinstance(chosen, dict):
        raise ConfigError(f"config field {name}={chosen!r}: it must be an object or null")
    return chosen, f"{name}."


def _kind(rope: Fields, prefix: str) -> str:
    new, old = rope.get("rope_type"), rope.get("type")
    if new is not None and old is not None and new != old:
        raise ConfigError(f"config fields {prefix}rope_type={new!r} and {prefix}type={old!r} disagree")
    kind = new if new is not None else old if old is not None else "default"
    if kind not in KINDS:
        raise UnsupportedModelError(
            f"config field {prefix}rope_type={kind!r} is not supported: jkv implements {', '.join(KINDS)}"
        )
    return kind


def _original(rope: Fields, max_position: int) -> int:
    return rope.optional_positive_int("original_max_position_embeddings") or max_position


def _llama3(rope: Fields, max_position: int) -> dict[str, Any]:
    low, high = rope.positive_float("low_freq_factor"), rope.positive_float("high_freq_factor")
    if high <= low:
        raise ConfigError(f"rope field high_freq_factor={high}: it must be above low_freq_factor={low}")
    return {
        "factor": rope.positive_float("factor"),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position": _original(rope, max_position),
    }


def _yarn(rope: Fields, max_position: int) -> dict[str, Any]:
    original = _original(rope, max_position)
    factor = rope.optional_positive_float("factor")
    fast = rope.optional_positive_float("beta_fast") or _DEFAULTS["beta_fast"]
    slow = rope.optional_positive_float("beta_slow") or _DEFAULTS["beta_slow"]
    return {
        "factor": factor if factor is not None else max_position / original,
        "original_max_position": original,
        "beta_fast": fast,
        "beta_slow": slow,
        "attention_factor": rope.optional_positive_float("attention_factor"),
        "mscale": rope.optional_positive_float("mscale"),
        "mscale_all_dim": rope.optional_positive_float("mscale_all_dim"),
        "truncate": rope.flag("truncate"),
    }
