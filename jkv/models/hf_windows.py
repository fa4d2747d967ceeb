"""Each layer's sliding window from a Hugging Face config."""

from __future__ import annotations

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.models.hf_families import Family
from jkv.models.hf_fields import Fields

_SLIDING, _FULL = "sliding_attention", "full_attention"


def windows_from_hf(fields: Fields, family: Family, layers: int) -> tuple[int | None, ...]:
    """`sliding_window` where a layer has it, else None.

    `layer_types` says which layers those are; configs older than it leave it to the family's own rule: Qwen's
    layers from `max_window_layers` on, every second layer of Gemma 2, all of Gemma 3's but each
    `sliding_window_pattern`-th.

    Raises:
        ConfigError: a field that cannot be right.
        UnsupportedModelError: a layer type that jkv does not implement.
    """
    if family.windows == "none":
        return (None,) * layers
    if family.windows == "every layer":
        return (fields.optional_positive_int("sliding_window"),) * layers
    window = _window(fields, family)
    types = fields.get("layer_types")
    if types is None:
        types = _implied(fields, family, layers)
    elif family.windows == "pattern":
        for name in ("sliding_window_pattern", "_sliding_window_pattern"):
            fields.get(name)  # transformers asks them only where there are no types
    elif family.windows == "qwen":
        fields.get("max_window_layers")
    return tuple(window if kind == _SLIDING else None for kind in _checked(types, layers))


def _window(fields: Fields, family: Family) -> int | None:
    if family.windows != "qwen":
        return fields.positive_int("sliding_window")
    window = fields.optional_positive_int("sliding_window")
    return window if fields.flag("use_sliding_window") else None


def _implied(fields: Fields, family: Family, layers: int) -> list[str]:
    if family.windows == "qwen":
        first = fields.get("max_window_layers")
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ConfigError(f"config field max_window_layers={first!r}: it must be a layer count from 0")
        return [_SLIDING if i >= first else _FULL for i in range(layers)]
    every = fields.positive_int("sliding_window_pattern") if family.windows == "pattern" else 2
    return [_SLIDING if (i + 1) % every else _FULL for i in range(layers)]


def _checked(types: object, layers: int) -> list[str]:
    if not isinstance(types, list) or len(types) != layers:
        raise ConfigError(
            f"config field layer_types={types!r}: it must list num_hidden_layers={layers} types"
        )
    for kind in types:
        if kind not in (_SLIDING, _FULL):
            raise UnsupportedModelError(
                f"config field layer_types has {kind!r}: jkv implements full_attention and sliding_attention"
            )
    return types
