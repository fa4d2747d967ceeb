"""The TPU's attention kernel, compiled for chips that need not be there."""

from __future__ import annotations

import json

import pytest

from jkv.plan.targets import TARGETS, find_libtpu
from tests.compiler_process import run_module
from tests.kernels.compile_tpu_attention import CASES, USUAL

_MIB = 2**20

pytestmark = pytest.mark.skipif(find_libtpu() is None, reason="libtpu is not installed")


def test_compiles_with_the_memory_it_is_said_to_need_and_without_a_copy_of_the_pool() -> None:
    _check("tpu-v6e:2x2", list(USUAL))


@pytest.mark.full
@pytest.mark.parametrize("target", ["tpu-v6e:2x2", "tpu-v5e:2x2"])
def test_every_head_size_and_page_size_too(target: str) -> None:
    _check(target, list(CASES))


def _check(target: str, names: list[str]) -> None:
    module = "tests.kernels.compile_tpu_attention"
    output = run_module([module, target, *names], TARGETS[target].environment())
    found = [json.loads(line) for line in output.splitlines()]
    assert [needs["case"] for needs in found] == names
    for needs in found:
        assert needs["kernels"] == (1 if CASES[needs["case"]].tokens == 1 else 2), needs
        assert needs["temporaries"] < 16 * _MIB, needs
