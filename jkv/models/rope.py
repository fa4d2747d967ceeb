"""Rotary frequencies as transformers computes them, in float32 and without torch or jax."""

from __future__ import annotations

import math

import numpy as np

from jkv.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """The angle per position of each pair of a head, and the factor on cos and sin.

    Pair `i` is the elements `i` and `i + head_dim / 2`. Sources: RoPE arXiv 2104.09864, linear interpolation
    arXiv 2306.15595, YaRN arXiv 2309.00071; Llama 3.1's bands as in transformers' `modeling_rope_utils`.

    Returns:
        float32 `[head_dim / 2]` in radians per position, and the attention scale (1.0 except for yarn).
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    periods = np.float32(rope.theta) ** exponents
    plain = np.float32(1.0) / periods
    if rope.kind == "default":
        return plain, 1.0
    if rope.kind == "linear":
        return plain / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    interpolated = np.float32(1.0) / (np.float32(rope.factor) * periods)
    ramp = _yarn_ramp(rope, head_dim)
    return interpolated * ramp + plain * (np.float32(1.0) - ramp), yarn_attention_scale(rope)


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Short wavelengths keep their frequency, long ones are divided by `factor`, the rest are blended."""
    low, high = np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
    original, factor = np.float32(rope.original_max_position), np.float32(rope.factor)
    wavelengths = np.float32(2 * math.pi) / plain
    smooth = (original / wavelengths - low) / (high - low)
    blended = (np.float32(1.0) - smooth) * plain / factor + smooth * plain
    scaled = np.where(wavelengths > original / low, plain / factor, blended)
    return np.where(wavelengths < original / high, plain, scaled).astype(np.float32)


def yarn_attention_scale(rope: RopeConfig) -> float:
    """The factor on cos and sin: `attention_factor` where given, else from `factor` and the two `mscale`s."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _magnitude(rope.factor, rope.mscale) / _magnitude(rope.factor, rope.mscale_all_dim)
    return _magnitude(rope.factor, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_ramp(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """0 where a pair keeps its frequency, 1 where it is interpolated; float32 `[head_dim / 2]`."""

    def pair_with(rotations: float) -> float:
        span = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(rope.theta))

    first, last = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # as transformers does, so that the ramp becomes a step and not a division by zero
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    return np.clip((pairs - np.float32(first)) / np.float32(last - first), 0, 1).astype(np.float32)
