from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jkv.errors import ConfigError
from jkv.paths import cache_dir, locked


def test_jkv_home_comes_before_xdg_and_that_before_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("JKV_HOME", "~/models")
    assert cache_dir() == Path("/h/models")
    monkeypatch.setenv("JKV_HOME", "")
    assert cache_dir() == Path("/x/jkv")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path("/h/.cache/jkv")


def test_a_lock_keeps_other_processes_out_until_it_is_released(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys\nfrom jkv.paths import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): print('in', flush=True)"
    )
    with locked(tmp_path / "new"):
        other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "new")], stdout=subprocess.PIPE)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
    output, _ = other.communicate(timeout=30)
    assert output == b"in\n"


def test_an_unusable_cache_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="JKV_HOME"), locked(tmp_path / "file" / "cache"):
        pass
