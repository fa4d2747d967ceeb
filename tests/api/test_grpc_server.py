"""Where the server cannot listen, and what it says then."""

from __future__ import annotations

import asyncio
import socket

import pytest

from jkv.api.grpc_server import GrpcServer
from jkv.errors import ConfigError


def _start(host: str, port: int) -> int:
    async def start() -> int:
        server = GrpcServer()
        try:
            return await server.start(host, port)
        finally:
            await server.stop()

    return asyncio.run(start())


def test_a_port_in_use_is_named_and_nothing_else_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--grpc-port {port}: cannot listen on .*: Address already"):
            _start("127.0.0.1", port)
    assert capfd.readouterr() == ("", "")
    assert _start("127.0.0.1", port) == port


def test_one_usable_address_of_a_host_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    addresses = [(*kind, ("192.0.2.1", 0)), (*kind, ("127.0.0.1", 0))]  # the first is for documentation only
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
    assert _start("127.0.0.1", 0) > 0


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--host no-such-host\.invalid: no such address"):
        _start("no-such-host.invalid", 0)
