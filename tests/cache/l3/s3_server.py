"""A process that speaks S3's protocol on loopback, with one bucket."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BUCKET = "pages"
_START_S = 60.0
_LISTENING = re.compile(r"Running on (http://127\.0\.0\.1:\d+)")


@dataclass(frozen=True)
class S3Server:
    endpoint: str

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a process that is to use it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }


@contextmanager
def s3_server(directory: Path) -> Iterator[S3Server]:
    """A server with an empty bucket, gone afterwards."""
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "s3"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        server = S3Server(_endpoint(process, log))
        urllib.request.urlopen(
            urllib.request.Request(f"{server.endpoint}/{BUCKET}", method="PUT"), timeout=10
        )
        yield server
    finally:
        process.kill()
        process.wait()


def _endpoint(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if found := _LISTENING.search(log.read_text()):
            return found[1]
        assert process.poll() is None, f"the S3 server has ended:\n{log.read_text()}"
        time.sleep(0.02)
    raise AssertionError(f"the S3 server does not listen after {_START_S:g} s")
