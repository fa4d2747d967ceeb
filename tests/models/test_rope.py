from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.models.config import RopeConfig
from jkv.models.rope import inverse_frequencies

YARN = RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position=32768)
LLAMA3 = RopeConfig(
    theta=500000.0,
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=8192,
)


def plain(theta: float, head_dim: int) -> np.ndarray:
    return np.array([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)])


def test_default_is_a_geometric_series_in_float32() -> None:
    frequencies, scale = inverse_frequencies(RopeConfig(theta=10000.0), 64)
    assert frequencies.dtype == np.float32
    assert frequencies.shape == (32,)
    assert scale == 1.0
    np.testing.assert_allclose(frequencies, plain(10000.0, 64), rtol=1e-6)


def test_linear_divides_every_frequency() -> None:
    frequencies, scale = inverse_frequencies(RopeConfig(theta=10000.0, kind="linear", factor=3.0), 64)
    assert scale == 1.0
    np.testing.assert_allclose(frequencies * 3.0, plain(10000.0, 64), rtol=1e-6)


def test_llama3_keeps_short_wavelengths_and_divides_long_ones() -> None:
    frequencies, scale = inverse_frequencies(LLAMA3, 128)
    expected = plain(500000.0, 128)
    wavelengths = 2 * math.pi / expected
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    assert scale == 1.0
    np.testing.assert_allclose(frequencies[short], expected[short], rtol=1e-6)
    np.testing.assert_allclose(frequencies[long], expected[long] / 8, rtol=1e-6)
    between = ~(short | long)
    assert between.any()
    ratio = expected[between] / frequencies[between]
    assert ((ratio > 1) & (ratio < 8)).all()


def test_llama3_blends_linearly_in_turns() -> None:
    """A wavelength with 2.5 turns in the context is halfway between the bands at 1 and 4 turns."""
    theta, head_dim = 10000.0, 4
    wavelength = 2 * math.pi * 100.0  # of pair 1: theta ** (2 / 4) = 100
    original = round(2.5 * wavelength)
    rope = RopeConfig(theta=theta, kind="llama3", factor=8.0, original_max_position=original)
    frequencies, _ = inverse_frequencies(rope, head_dim)
    assert frequencies[1] == pytest.approx(0.01 * (0.5 / 8 + 0.5), rel=1e-3)


def test_yarn_keeps_the_first_pair_and_interpolates_the_last() -> None:
    frequencies, scale = inverse_frequencies(YARN, 128)
    expected = plain(1e6, 128)
    assert frequencies[0] == pytest.approx(expected[0], rel=1e-6)
    assert frequencies[-1] == pytest.approx(expected[-1] / 4, rel=1e-6)
    assert scale == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_ramp_ends_at_the_pairs_of_beta_fast_and_beta_slow() -> None:
    frequencies, _ = inverse_frequencies(YARN, 128)
    ratio = plain(1e6, 128) / frequencies
    turns = 32768 * plain(1e6, 128) / (2 * math.pi)
    first, last = np.flatnonzero(turns > 32).max(), np.flatnonzero(turns < 1).min()
    np.testing.assert_allclose(ratio[: first + 1], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[last:], 4.0, rtol=1e-6)
    assert (np.diff(ratio[first : last + 1]) > 0).all()
    # Half of the way, a frequency is the mean of its two ends.
    middle = (first + last) / 2
    if middle.is_integer():
        assert 1 / ratio[int(middle)] == pytest.approx((1 + 1 / 4) / 2, rel=1e-5)


def test_yarn_without_truncation_uses_fractional_ends() -> None:
    rough, _ = inverse_frequencies(YARN, 128)
    exact, _ = inverse_frequencies(RopeConfig(**{**YARN.__dict__, "truncate": False}), 128)

    def pair(turns: float) -> float:
        return 128 * math.log(32768 / (turns * 2 * math.pi)) / (2 * math.log(1e6))

    first, last = pair(32), pair(1)
    index = round((first + last) / 2)
    ramp = (index - first) / (last - first)
    assert exact[index] == pytest.approx(plain(1e6, 128)[index] * (1 - ramp + ramp / 4), rel=1e-5)
    assert not np.array_equal(rough, exact)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"attention_factor": 0.7}, 0.7),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"mscale": 2.0}, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_attention_scale(change: dict[str, float], expected: float) -> None:
    _, scale = inverse_frequencies(RopeConfig(**{**YARN.__dict__, **change}), 128)
    assert scale == pytest.approx(expected)


@given(
    head_dim=st.integers(2, 128).map(lambda n: 2 * n),
    theta=st.floats(1e3, 1e7),
    factor=st.floats(1.0, 64.0),
    kind=st.sampled_from(["linear", "llama3", "yarn"]),
)
def test_scaled_frequencies_lie_between_the_plain_ones_and_their_quotient(
    head_dim: int, theta: float, factor: float, kind: str
) -> None:
    base = RopeConfig(theta=theta, factor=factor, original_max_position=8192)
    scaled, _ = inverse_frequencies(RopeConfig(**{**base.__dict__, "kind": kind}), head_dim)
    unscaled, _ = inverse_frequencies(base, head_dim)
    assert (scaled <= unscaled * 1.00001).all()
    assert (scaled >= unscaled / factor * 0.99999).all()
    assert (np.diff(scaled) < 0).all()
