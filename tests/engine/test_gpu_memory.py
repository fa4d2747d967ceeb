from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from typing import Any
from unittest import mock

import pytest
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options

from jkv.config import GIB
from jkv.engine.gpu_memory import MEMORY_FRACTION, allow_gpu_memory
from jkv.engine.l1_size import ProgramBytes, divide
from jkv.plan.chips import H100


def _told_to_jax(given: Mapping[str, str], host_bytes: int = 256 * GIB) -> tuple[Mapping[str, Any], str]:
    """The options that jax starts its client for GPUs with, and XLA's limit for pinned memory."""
    environment = dict(given)
    allow_gpu_memory(environment, host_bytes)
    with mock.patch.dict("os.environ", environment, clear=True):
        return generate_pjrt_gpu_plugin_options(), environment["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"]


@pytest.mark.parametrize(
    ("given", "fraction"),
    [
        ({}, MEMORY_FRACTION),
        ({"XLA_CLIENT_MEM_FRACTION": ""}, MEMORY_FRACTION),
        ({"XLA_CLIENT_MEM_FRACTION": "0.4"}, 0.4),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, 0.5),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, MEMORY_FRACTION),
    ],
)
def test_jax_takes_jkvs_share_unless_it_is_told_another(given: dict[str, str], fraction: float) -> None:
    options, _ = _told_to_jax(given)
    assert options["memory_fraction"] == fraction
    assert options.get("preallocate") == (False if given.get("XLA_PYTHON_CLIENT_PREALLOCATE") else None)


def test_as_much_can_be_pinned_as_the_host_has() -> None:
    assert _told_to_jax({})[1] == "256"
    assert _told_to_jax({}, GIB // 2)[1] == "1"
    assert _told_to_jax({"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "8"})[1] == "8"


def test_a_plan_for_a_gpu_is_for_what_a_server_takes() -> None:
    described = resources.files("jkv.plan.targets").joinpath("h100_sxm.textproto").read_text()
    found = re.search(r"device_memory_size: (\d+)", described)
    assert found
    assert H100.memory_bytes == int(int(found[1]) * MEMORY_FRACTION)
    left = divide(H100.memory_bytes, 0, [ProgramBytes(temporaries=0, outputs=0, code=0)], 1).left
    assert 0.9 * int(found[1]) < left < H100.memory_bytes
