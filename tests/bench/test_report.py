from __future__ import annotations

from pathlib import Path

import pytest

from jkv.bench.calibrate import calibrate
from jkv.bench.metrics import Spread
from jkv.bench.report import spread_row
from jkv.errors import JkvError


def test_spreads_are_shown_in_milliseconds() -> None:
    assert spread_row("TTFT", Spread(p50=0.001, p90=0.01, p99=0.1, mean=1.0)) == (
        "TTFT",
        "1.00",
        "10.00",
        "100.00",
        "1000.00",
    )
    assert spread_row("TTFT", None)[1:] == ("n/a",) * 4


def test_calibration_measures_this_machine() -> None:
    measured = calibrate()
    assert measured.matmul_gflops > 0.1
    assert measured.matmul_vs_reference == pytest.approx(measured.matmul_gflops / 130)
    assert measured.memory_read_gb_per_s > 0.1


def test_a_calibration_that_dies_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "jax.py").write_text("raise RuntimeError('no jax today')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(JkvError, match="no jax today"):
        calibrate()
