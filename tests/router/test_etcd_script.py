"""scripts/etcd, as people run it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jkv.router.etcd import Etcd, EtcdOptions
from jkv.router.etcd_ops import EtcdUnavailableError, Put
from tests.router.etcd_server import free_ports

_SCRIPT = Path(__file__).parents[2] / "scripts" / "etcd"


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path}


def _put_and_read(port: int, value: bytes) -> bytes | None:
    """What was there, before `value` takes its place."""

    async def play() -> bytes | None:
        etcd = Etcd(EtcdOptions(endpoints=(f"127.0.0.1:{port}",)))
        end = time.monotonic() + 60
        try:
            while True:
                try:
                    before = await etcd.get("/k")
                    await etcd.txn([], [Put("/k", value)])
                    return None if before is None else before.value
                except EtcdUnavailableError:
                    assert time.monotonic() < end
                    await asyncio.sleep(0.05)
        finally:
            await etcd.close()

    return asyncio.run(play())


def test_it_serves_until_ctrl_c_and_keeps_its_data(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    seen = []
    for value in (b"1", b"2"):
        process = subprocess.Popen(
            [_SCRIPT, "--data-dir", tmp_path / "data", "--port", str(port)],
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(),
            start_new_session=True,
        )
        try:
            seen.append(_put_and_read(port, value))
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait()
        assert f"127.0.0.1:{port}" in out
    assert seen == [None, b"1"]


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (["--help"], 0, "--data-dir PATH"),
        (["--port", "0"], 2, "--port 0"),
        (["--port"], 2, "--port needs a value"),
        (["--ports", "1"], 2, "--ports"),
        (["--data-dir", ""], 2, "--data-dir"),
    ],
)
def test_help_and_arguments_that_are_wrong(arguments: list[str], status: int, named: str) -> None:
    ended = subprocess.run(
        [_SCRIPT, *arguments], capture_output=True, text=True, timeout=30, env=_environment(), check=False
    )
    assert ended.returncode == status
    assert named in (ended.stdout if status == 0 else ended.stderr)
