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
def test_it_shows_a_hit_in_every_tier_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = subprocess.run(
        _DEMO,
        cwd=_ROOT,
        env=environment(TMPDIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "generated in turn 1" in done.stdout
    assert "The generated tokens are the same each time." in done.stdout
    rows = re.findall(r"^  (\S.*?) +(\d+) +(\d+) +(\d+) +(\d+) +\d+ ms", done.stdout, re.MULTILINE)
    prompt = int(rows[0][1])
    hit = str(prompt // 64 * 64 if prompt % 64 else prompt - 1)
    assert rows == [
        ("none (cold)", str(prompt), "0", "0", "0"),
        ("L1, device", str(prompt), hit, "0", "0"),
        ("L2, host memory", str(prompt), "0", hit, "0"),
        ("L3, disk", str(prompt), "0", "0", hit),
        ("L3, after a restart", str(prompt), "0", "0", hit),
    ]
    assert not any(_listens(line) for line in done.stdout.splitlines() if "listening on" in line)
    assert not list(tmp_path.glob("jkv-demo-*"))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_its_server(number: int, status: int, tmp_path: Path) -> None:
    variables = environment(TMPDIR=str(tmp_path))
    with subprocess.Popen(_DEMO, cwd=_ROOT, env=variables, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        first, listening = demo.stdout.readline(), demo.stdout.readline()
        assert "Starting" in first
        assert _listens(listening)
        demo.send_signal(number)
        rest = demo.stdout.read()
        assert demo.wait(15) == status
    assert "The server has stopped." in rest
    assert not _listens(listening)
    assert not list(tmp_path.glob("jkv-demo-*"))
