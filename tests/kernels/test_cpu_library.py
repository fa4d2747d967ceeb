"""The kernels are compiled once for a processor and a compiler; without one XLA's code takes their place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jkv.kernels import cpu_library

_PLAN = """
from jkv.config import ServeConfig
from jkv.engine.planning import plan_for
from tests.engine.plans import SMOLLM2
plan = plan_for(ServeConfig(), SMOLLM2, "cpu")
print(plan.attention.kernel, "panels" if plan.panels else plan.dense_product(8))
"""


def _plan(home: Path, compiler: str | None = None) -> tuple[str, str]:
    """What the plan of a process chooses, and what it says on stderr."""
    environment = {**os.environ, "JKV_HOME": str(home), "JAX_PLATFORMS": "cpu"}
    environment.pop("CXX", None)
    if compiler is not None:
        environment["CXX"] = compiler
    run = subprocess.run([sys.executable, "-c", _PLAN], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip(), run.stderr


def _script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(not cpu_library.available(), reason="no C++ compiler")
def test_the_library_is_compiled_once(tmp_path: Path) -> None:
    real = shutil.which("c++")
    counting = _script(tmp_path / "counting", f'echo "$*" >> {tmp_path}/calls\nexec {real} "$@"')
    assert _plan(tmp_path / "home", counting)[0] == "cpu panels"
    assert _plan(tmp_path / "home", counting)[0] == "cpu panels"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sum("-shared" in call for call in calls) == 1
    assert [p.suffix for p in (tmp_path / "home/cpu").iterdir() if p.name != ".lock"] == [".so"]


def test_without_a_compiler_xla_s_code_runs_and_the_log_says_so(tmp_path: Path) -> None:
    choice, said = _plan(tmp_path, "/nowhere/c++")
    assert choice == "xla weights_first"
    assert "CPU kernels cannot be had" in said
    assert "/nowhere/c++" in said


def test_what_a_compiler_complains_of_is_shown(tmp_path: Path) -> None:
    failing = _script(
        tmp_path / "failing", 'case "$*" in --version) ;; *) echo "no such flag" >&2; exit 3;; esac'
    )
    choice, said = _plan(tmp_path / "home", failing)
    assert choice == "xla weights_first"
    assert "status 3: no such flag" in said
    assert not [p for p in (tmp_path / "home/cpu").iterdir() if p.name != ".lock"]


def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    choice, said = _plan(tmp_path / "home")
    assert choice == "xla weights_first"
    assert "CPU kernels cannot be had" in said
