from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

from jkv.bench.machine import measure


def test_every_speed_is_measured_and_no_file_is_left(tmp_path: Path) -> None:
    assert all(1e6 < speed < 1e12 for speed in astuple(measure(tmp_path, 100_000, 4)))
    assert list(tmp_path.iterdir()) == []
