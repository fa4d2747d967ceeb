from __future__ import annotations

import pytest

from jkv.bench import __main__ as bench
from jkv.bench.calibrate import Calibration

from .servers import FakeModel


@pytest.fixture(autouse=True)
def _calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed one: test_report.py runs the real one, which takes seconds."""
    fixed = Calibration(matmul_gflops=65.0, matmul_vs_reference=0.5, memory_read_gb_per_s=12.3)
    monkeypatch.setattr(bench, "calibrate", lambda: fixed)


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()
