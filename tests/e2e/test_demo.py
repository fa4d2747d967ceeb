"""The demo as a user runs it, after the installation."""

from __future__ import annotations

import importlib
import os
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


def _cached(prompt: int) -> int:
    """How many tokens of a prompt that was asked before come from the cache."""
    return prompt // 64 * 64 if prompt % 64 else prompt - 1


def _check_cluster(output: str) -> None:
    assert re.search(r"^etcd at [\d.:]+, where", output, re.MULTILINE), output
    found = re.search(r"^  (\d+) tokens go to (one|two): ", output, re.MULTILINE)
    assert found is not None, output
    hit = str(_cached(int(found[1])))
    assert re.search(rf"^  one +{hit} +0 +0 ", output, re.MULTILINE)
    assert re.search(rf"^  two +0 +0 +{hit} ", output, re.MULTILINE)
    rows = re.findall(r"^  (\S.*?) +(one|two) +(\d+) +(\d+) +(\d+) +(\d+) +\d+ ms$", output, re.MULTILINE)
    assert [row[1] for row in rows] == ["one", "one", "two", "two"]
    assert [row[2:] for row in rows[:2]] == [("0", "0", "0", "0"), (hit, "0", "0", "0")]
    assert int(rows[2][4]) >= int(hit), "what the dead engine wrote to L3 was not used"
    assert rows[3][2:] == (hit, "0", "0", "0")
    assert "the answer is the same, token by token" in output


@pytest.mark.full
def test_it_shows_every_tier_and_a_cluster_and_leaves_nothing_behind(tmp_path: Path) -> None:
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
    rows = re.findall(r"^  (\S.*?) +(\d+) +(\d+) +(\d+) +(\d+) +\d+ ms +\S+x$", done.stdout, re.MULTILINE)
    prompt = int(rows[0][1])
    hit = str(_cached(prompt))
    assert rows == [
        ("none (cold)", str(prompt), "0", "0", "0"),
        ("L1, device", str(prompt), hit, "0", "0"),
        ("L2, host memory", str(prompt), "0", hit, "0"),
        ("L3, disk", str(prompt), "0", "0", hit),
        ("L3, after a restart", str(prompt), "0", "0", hit),
    ]
    _check_cluster(done.stdout)
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


def test_without_etcd_it_says_why_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "etcd"
    broken.write_text("#!/bin/sh\necho out of order\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.syspath_prepend(_ROOT / "scripts")
    demo_cluster = importlib.import_module("demo_cluster")
    with demo_cluster.private_etcd(tmp_path / "data") as etcd:
        assert etcd is None
        assert demo_cluster.joining("one", etcd) == ("--instance-id", "one")
    output = capsys.readouterr().out
    assert "No etcd, so the router gets a fixed list of engines: etcd ended with status 3" in output
    assert "out of order" in output
