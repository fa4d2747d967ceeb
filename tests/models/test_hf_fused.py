"""Checkpoints with one tensor for all experts of a layer: what an expert gets of it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jkv.errors import UnsupportedModelError
from jkv.models.params import load_params
from jkv.models.resolve import Checkpoint, convert, open_checkpoint, resolve_model
from tests.models.golden import TINY, config_json, weights

_EXPERTS = "model.layers.1.mlp.experts"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def write(directory: Path, name: str, tensors: dict[str, np.ndarray]) -> Checkpoint:
    (directory / "config.json").write_text(json.dumps(config_json(name)))
    save_file(tensors, directory / "model.safetensors")
    return open_checkpoint(resolve_model(str(directory)))


def fused_mixtral() -> dict[str, np.ndarray]:
    """The tiny Mixtral as transformers 5 has it in memory."""
    tensors, fused = weights("mixtral"), {}
    for name, values in tensors.items():
        if ".experts." not in name:
            fused[name.replace("block_sparse_moe", "mlp")] = values
    for layer in range(2):
        w1, w2, w3 = (
            np.stack(
                [tensors[f"model.layers.{layer}.block_sparse_moe.experts.{i}.{w}.weight"] for i in range(8)]
            )
            for w in ("w1", "w2", "w3")
        )
        experts = f"model.layers.{layer}.mlp.experts"
        fused |= {f"{experts}.gate_up_proj": np.concatenate([w1, w3], axis=1), f"{experts}.down_proj": w2}
    return fused


def params_of(checkpoint: Checkpoint) -> Any:
    return load_params(checkpoint.config, checkpoint.source, "float32", stacked=True, workers=2)


def test_an_expert_has_its_rows_of_the_fused_tensors() -> None:
    source = open_checkpoint(resolve_model(str(TINY / "qwen3_moe_fused"))).source
    fused = weights("qwen3_moe_fused")
    gate_up, down = fused[f"{_EXPERTS}.gate_up_proj"][5], fused[f"{_EXPERTS}.down_proj"][5]
    for projection, values in {"gate_proj": gate_up[:24], "up_proj": gate_up[24:], "down_proj": down}.items():
        name = f"{_EXPERTS}.5.{projection}.weight"
        assert (source.shape(name), source.dtype(name)) == (values.shape, "float32")
        np.testing.assert_array_equal(source.read(name), values)
    assert sum(".experts." in name for name in source.names()) == 2 * 8 * 3


def test_a_fused_mixtral_is_the_same_model(tmp_path: Path) -> None:
    fused = params_of(write(tmp_path, "mixtral", fused_mixtral()))
    separate = params_of(open_checkpoint(resolve_model(str(TINY / "mixtral"))))
    np.testing.assert_array_equal(fused.embed, separate.embed)
    for projection in _PROJECTIONS:
        ours, theirs = (p.layers["mlp"]["experts"][projection]["weight"][...] for p in (fused, separate))
        np.testing.assert_array_equal(ours, theirs)


def test_sixteen_bit_experts_keep_their_type_and_can_be_converted(tmp_path: Path) -> None:
    tensors = {name: values.astype(ml_dtypes.bfloat16) for name, values in weights("qwen3_moe_fused").items()}
    (tmp_path / "model").mkdir()
    before = write(tmp_path / "model", "qwen3_moe_fused", tensors).source
    convert(resolve_model(str(tmp_path / "model")), tmp_path / "out")
    after = open_checkpoint(resolve_model(str(tmp_path / "out"))).source
    assert (after.names(), after.fingerprint()) == (before.names(), before.fingerprint())
    for projection in _PROJECTIONS:
        name = f"{_EXPERTS}.3.{projection}.weight"
        assert before.dtype(name) == after.dtype(name) == "bfloat16"
        np.testing.assert_array_equal(before.read(name), after.read(name))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("gate_up_proj", (8, 47, 32)), ("gate_up_proj", (48, 32)), ("down_proj", (8, 32, 24, 1))],
)
def test_shapes_that_no_experts_have_are_refused(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    tensors = weights("qwen3_moe_fused") | {f"{_EXPERTS}.{kind}": np.zeros(shape, np.float32)}
    with pytest.raises(UnsupportedModelError, match=rf"{kind} has shape .*{shape[0]}.*; allowed: \[experts"):
        write(tmp_path, "qwen3_moe_fused", tensors)


@pytest.mark.parametrize(("experts", "named"), [(7, "missing"), (9, "has no tensor")])
def test_another_number_of_experts_is_refused(tmp_path: Path, experts: int, named: str) -> None:
    tensors = weights("qwen3_moe_fused") | {f"{_EXPERTS}.down_proj": np.zeros((experts, 32, 24), np.float32)}
    checkpoint = write(tmp_path, "qwen3_moe_fused", tensors)
    with pytest.raises(UnsupportedModelError, match=named):
        params_of(checkpoint)


def test_an_expert_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    name = f"{_EXPERTS}.2.up_proj.weight"
    extra = {name: np.zeros((24, 32), np.float32)}
    with pytest.raises(UnsupportedModelError, match=f"tensor {name} alone and fused"):
        write(tmp_path, "qwen3_moe_fused", weights("qwen3_moe_fused") | extra)
    original = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    extra = {original: np.zeros((24, 32), np.float32)}
    with pytest.raises(UnsupportedModelError, match=f"{original} and {name}, which are one"):
        write(tmp_path, "mixtral", fused_mixtral() | extra)
