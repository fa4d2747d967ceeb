"""How weights are cut for devices that share a model, and for how many of them they can be."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jkv.errors import ConfigError
from jkv.models.config import ExpertsConfig
from jkv.models.params import tensor_names
from jkv.models.sharding import (
    check_experts,
    check_tp,
    device_mesh,
    partition,
    possible_tp,
    widened,
    widened_tensor,
)
from tests.engine.plans import LLAMA3_8B, SMOLLM2

_ODD = dataclasses.replace(SMOLLM2, hidden_size=4, head_dim=2, intermediate_size=10, num_layers=1)


def test_devices_have_whole_heads() -> None:
    assert possible_tp(SMOLLM2) == [1, 3, 9]
    assert possible_tp(LLAMA3_8B) == [1, 2, 4, 8, 16, 32]
    with pytest.raises(
        ConfigError, match=r"^--tp 5: the model has 9 heads and 3 KV heads; allowed: 1, 3, 9$"
    ):
        check_tp(5, SMOLLM2)


def test_there_must_be_as_many_devices() -> None:
    assert device_mesh(1, []) is None
    with pytest.raises(
        ConfigError, match=r"^--tp 4: needs as many devices, and there are 2 \(TPU v6 lite\)$"
    ):
        device_mesh(4, [SimpleNamespace(device_kind="TPU v6 lite")] * 2)


@pytest.mark.parametrize("tp", [1, 3, 9])
def test_widened_weights_have_the_shapes_of_the_widened_model_and_divide(tp: int) -> None:
    wide = widened(_ODD, tp)
    for name, shape in tensor_names(wide, "float32").items():
        before = tensor_names(_ODD, "float32")[name]
        assert widened_tensor(name, np.zeros(before), _ODD, tp).shape == shape
        cut = partition(name, shape, tp)
        assert all(size % tp == 0 for size, axis in zip(shape, cut, strict=False) if axis is not None)


def test_a_kv_head_lies_next_to_its_copies() -> None:
    k = np.arange(3 * 2 * 4).reshape(6, 4)
    wide = widened_tensor("model.layers.0.self_attn.k_proj.weight", k, _ODD, 9)
    assert list(wide[::2, 0]) == [0, 0, 0, 8, 8, 8, 16, 16, 16]
    assert list(wide[1::2, 0]) == [4, 4, 4, 12, 12, 12, 20, 20, 20]


def test_padding_adds_nothing() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(4)
    gate, up, down = (rng.standard_normal(s) for s in ((10, 4), (10, 4), (4, 10)))

    def mlp(gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        inner = gate @ x
        return down @ (inner / (1 + np.exp(-inner)) * (up @ x))

    names = ("gate_proj", "up_proj", "down_proj")
    wide = [
        widened_tensor(f"model.layers.0.mlp.{n}.weight", w, _ODD, 9)
        for n, w in zip(names, (gate, up, down), strict=True)
    ]
    assert [w.shape for w in wide] == [(18, 4), (18, 4), (4, 18)]
    assert mlp(*wide) == pytest.approx(mlp(gate, up, down))


def test_experts_are_cut_or_dealt_out() -> None:
    mixture = dataclasses.replace(SMOLLM2, experts=ExpertsConfig(count=6, per_token=2, normalized=True))
    check_experts(3, mixture)
    with pytest.raises(ConfigError, match=r"^--ep: --tp 9 must be 2 or more and divide 6 experts$"):
        check_experts(9, mixture)
    with pytest.raises(ConfigError, match=r"^--ep: --tp 1 must be 2 or more"):
        check_experts(1, mixture)
    with pytest.raises(ConfigError, match=r"^--ep: the model has no experts"):
        check_experts(3, SMOLLM2)
    gate, down = (f"model.layers.0.mlp.experts.{n}.weight" for n in ("gate_proj", "down_proj"))
    assert partition(gate, (6, 4, 8), 2) == P(None, None, "tp")
    assert partition(down, (6, 8, 4), 2) == P(None, "tp")
    assert partition(gate, (6, 4, 8), 2, whole_experts=True) == P("tp")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.bias", (8,), P("tp")),
        ("model.layers.0.self_attn.o_proj.weight", (4, 8), P(None, "tp")),
        ("model.layers.0.self_attn.o_proj.bias", (4,), P()),
        ("model.layers.0.self_attn.q_norm.weight", (2,), P()),
        ("model.layers.0.input_layernorm.weight", (4,), P()),
        ("model.embed_tokens.weight", (12, 4), P("tp")),
        ("lm_head.weight", (13, 4), P()),
    ],
)
def test_partitions(name: str, shape: tuple[int, ...], expected: P) -> None:
    assert partition(name, shape, 4) == expected
