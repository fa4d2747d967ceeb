"""Runs a compiler for a device that is not there in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_TRIES = 3


def run_module(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """`python -m ARGV`'s output. On a busy machine libtpu now and then dies of a signal while two threads
    compile, and compiles the same programs the next time; an error that it reports is one at once.
    """
    tries = (_run(argv, environment) for _ in range(_TRIES))
    found = next((run for run in tries if run.returncode >= 0), None)
    assert found is not None, f"{argv[0]} died of a signal {_TRIES} times"
    assert found.returncode == 0, found.stderr
    return found.stdout


def _run(argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *argv],
        cwd=_ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
