"""Several devices that share a model: XLA gives a process as many of CPU as it is told when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


def test_on_eight_devices(pytestconfig: pytest.Config) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/engine/eight_devices.py", "-m", pytestconfig.option.markexpr],
        cwd=_ROOT,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert run.returncode == 0, run.stdout + run.stderr
