"""What building an engine asks of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from jkv.engine import build


def test_available_memory_is_read_from_meminfo_and_bounded_by_the_machine_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       24 kB\nMemAvailable:   17 kB\nHugePages_Total:       0\n")
    monkeypatch.setattr(build, "_MEMINFO", meminfo)
    assert build._host_available() == 17 * 1024
    monkeypatch.setattr(build, "_MEMINFO", tmp_path / "none")
    monkeypatch.setattr(build.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10}.__getitem__)
    assert build._host_available() == 40960
