from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from jkv.errors import ConfigError
from jkv.plan import targets
from jkv.plan.targets import TARGETS, find_libtpu


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    return tmp_path


def test_a_tpu_without_its_compiler_says_what_to_install(nothing_installed: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^--target tpu-v6e:2x2: .* pip install libtpu==.*TPU_LIBRARY_PATH"
    ):
        TARGETS["tpu-v6e:2x2"].environment()


def test_a_gpu_without_its_compiler_says_what_to_install(nothing_installed: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--target h100:1: .* pip install jax-cuda12-plugin==.*nvcc"):
        TARGETS["h100:1"].environment()


def test_a_gpus_compiler_is_found_beside_the_packages(
    monkeypatch: pytest.MonkeyPatch, nothing_installed: Path
) -> None:
    packages = nothing_installed / "cuda12-0.0.1"
    (packages / "jax_cuda12_plugin").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", "here")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    environment = TARGETS["h100:4"].environment()
    assert environment["PYTHONPATH"] == f"{packages}{os.pathsep}here"
    assert environment["XLA_FLAGS"] == f"--xla_dump_to=x --xla_gpu_cuda_data_dir={packages}/nvidia/cuda_nvcc"
    assert "H100" in TARGETS["h100:4"].options()["target_config"]


def test_libtpu_is_taken_from_the_variable_first_then_from_beside_the_packages(
    monkeypatch: pytest.MonkeyPatch, nothing_installed: Path
) -> None:
    beside = nothing_installed / "libtpu-0.0.1" / "libtpu" / "libtpu.so"
    beside.parent.mkdir(parents=True)
    beside.touch()
    assert find_libtpu() == beside
    monkeypatch.setenv("TPU_LIBRARY_PATH", "other.so")
    assert TARGETS["tpu-v5e:2x2"].environment()["TPU_LIBRARY_PATH"] == "other.so"


def test_a_cpu_needs_nothing(nothing_installed: Path) -> None:
    assert TARGETS["cpu"].environment()["JAX_PLATFORMS"] == "cpu"
