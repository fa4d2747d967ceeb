"""The demo as a user runs it, after the installation."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import environment

_ROOT = Path(__file__).parents[2]
_DEMO = [sys.executable, "scripts/demo.py"]


def _listens(line: str) -> bool:
    """Whether anyone still listens where the demo's server said that it does."""
    found = re.search(r"listening on ([\d.]+):(\d+)", line)
    assert found is not None, line
    with socket.socket() as probe:
        return probe.connect_ex((found[1], int(found[2]))) == 0


@pytest.mark.full
def test_it_shows_hits_and_leaves_nothing_running() -> None:
    done = subprocess.run(
        _DEMO, cwd=_ROOT, env=environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "generated in turn 1" in done.stdout
    row = re.search(r"L1, device +(\d+) +(\d+)", done.stdout)
    assert row is not None
    assert int(row[1]) - 64 <= int(row[2]) < int(row[1])
    assert not _listens(done.stdout)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_its_server(number: int, status: int) -> None:
    with subprocess.Popen(_DEMO, cwd=_ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        first, listening = demo.stdout.readline(), demo.stdout.readline()
        assert "Starting" in first
        assert _listens(listening)
        demo.send_signal(number)
        rest = demo.stdout.read()
        assert demo.wait(15) == status
    assert "The server has stopped." in rest
    assert not _listens(listening)
