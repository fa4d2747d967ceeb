"""What the table of chips says, against what their compilers enforce."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from jkv.config import GIB
from jkv.plan.targets import TARGETS, find_libtpu

_TOO_LARGE = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jkv.plan.compiling import devices
from jkv.plan.targets import TARGETS

place = SingleDeviceSharding(devices(TARGETS[sys.argv[1]])[0])
jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((2**36,), jnp.int8, sharding=place)).compile()
"""


@pytest.mark.full
@pytest.mark.skipif(find_libtpu() is None, reason="libtpu is not installed")
@pytest.mark.parametrize("name", ["tpu-v5e:2x2", "tpu-v6e:2x2"])
def test_a_tpus_memory_is_what_its_compiler_allows(name: str) -> None:
    target = TARGETS[name]
    run = subprocess.run(
        [sys.executable, "-c", _TOO_LARGE, name],
        env=os.environ | target.environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    allowed = re.search(r"exceeds available HBM \(([\d.]+)G\)", run.stderr)
    assert allowed is not None, run.stderr
    assert target.chip is not None
    assert target.chip.memory_bytes == float(allowed[1]) * GIB
