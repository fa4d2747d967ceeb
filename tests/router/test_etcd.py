"""The client against a real etcd: what it says, and what it does when etcd fails."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from jkv.router import etcd_ops as ops
from jkv.router.etcd import Etcd, EtcdOptions
from jkv.router.etcd_ops import Delete, Get, Put
from tests.router.etcd_server import EtcdServer, etcd_server, free_ports

T = TypeVar("T")


def with_client(options: EtcdOptions, play: Callable[[Etcd], Awaitable[T]]) -> T:
    async def run() -> T:
        etcd = Etcd(options)
        try:
            return await play(etcd)
        finally:
            await etcd.close()

    return asyncio.run(run())


async def once_up(call: Callable[[], Awaitable[T]]) -> T:
    """The result of a call that is repeated while etcd starts."""
    end = time.monotonic() + 20
    while True:
        try:
            return await call()
        except ops.EtcdUnavailableError:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)


def test_transactions_and_their_conditions(shared_etcd: EtcdServer, cluster: str) -> None:
    key, prefix = f"/{cluster}/a/1", f"/{cluster}/a/"

    async def play(etcd: Etcd) -> None:
        first = await etcd.txn([ops.absent(prefix)], [Put(key, b"x")])
        assert first.succeeded
        assert not (await etcd.txn([ops.absent(prefix)], [])).succeeded
        assert (await etcd.txn([ops.all_equal(prefix, b"x")], [])).succeeded
        assert (await etcd.txn([ops.exists(key)], [Put(f"/{cluster}/a/2", b"y")])).succeeded
        assert not (await etcd.txn([ops.all_equal(prefix, b"x")], [])).succeeded
        assert not (await etcd.txn([ops.all_equal(f"/{cluster}/none/", b"x")], [])).succeeded
        found = await etcd.get(key)
        assert found is not None
        assert (found.value, found.mod_revision) == (b"x", first.revision)
        fenced = await etcd.txn([ops.modified_at(key, first.revision - 1)], [Put(key, b"z")], [Get(prefix)])
        assert not fenced.succeeded
        assert [kv.value for kv in fenced.found[0]] == [b"x", b"y"]
        assert (await etcd.txn([], [Delete(prefix)])).succeeded
        assert (await etcd.list(prefix))[0] == []
        assert await etcd.get(key) is None

    with_client(shared_etcd.options, play)


def test_a_long_listing_is_of_one_revision(shared_etcd: EtcdServer, cluster: str) -> None:
    prefix = f"/{cluster}/many/"

    async def play(etcd: Etcd) -> None:
        for start in range(0, 2100, 100):
            await etcd.txn([], [Put(f"{prefix}{number:05}", b"") for number in range(start, start + 100)])
        pages = []
        async for page, revision in etcd.pages(prefix):
            await etcd.txn([], [Put(f"{prefix}99999", b"new"), Delete(f"{prefix}01999")])
            pages.append((len(page), revision))
        assert [size for size, _ in pages] == [1000, 1000, 100]
        assert len({revision for _, revision in pages}) == 1
        assert len((await etcd.list(prefix))[0]) == 2100

    with_client(shared_etcd.options, play)


def test_a_watch_goes_on_after_a_revision_and_ends_where_it_was_compacted(own_etcd: EtcdServer) -> None:
    async def play(etcd: Etcd) -> None:
        revisions = [(await etcd.txn([], [Put("/w/k", str(n).encode())])).revision for n in range(4)]
        seen: list[bytes] = []
        async for batch in etcd.watch("/w/", revisions[0]):
            seen += [event.kv.value for event in batch.events]
            if len(seen) == 3:
                break
        assert seen == [b"1", b"2", b"3"]
        await asyncio.to_thread(own_etcd.compact)
        for after, why in ((revisions[0], "compacted"), (revisions[3] + 100, "was reset")):
            with pytest.raises(ops.RevisionGoneError, match=why):
                async for _ in etcd.watch("/w/", after):
                    pass

    with_client(own_etcd.options, play)


def test_leases(shared_etcd: EtcdServer, cluster: str) -> None:
    async def play(etcd: Etcd) -> None:
        lease = await etcd.grant(30)
        await etcd.txn([], [Put(f"/{cluster}/leased", b"", lease)])
        await etcd.keep_alive(lease)
        await etcd.revoke(lease)
        assert await etcd.get(f"/{cluster}/leased") is None
        for call in (etcd.keep_alive(lease), etcd.txn([], [Put(f"/{cluster}/leased", b"", lease)])):
            with pytest.raises(ops.LeaseLostError):
                await call

    with_client(shared_etcd.options, play)


def test_nothing_hangs_on_a_stopped_etcd(own_etcd: EtcdServer) -> None:
    async def play(etcd: Etcd) -> None:
        lease = await etcd.grant(60)
        watch = etcd.watch("/w/", 0)
        await anext(watch)
        own_etcd.stop()
        calls = (etcd.get("/k"), etcd.keep_alive(lease), etcd.grant(5), anext(watch))
        started = time.monotonic()
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, ops.EtcdUnavailableError), result
        assert time.monotonic() - started < 10
        own_etcd.resume()
        assert await etcd.get("/k") is None

    options = EtcdOptions(endpoints=(own_etcd.address,), timeout_s=1.0)
    with_client(options, play)


def test_an_endpoint_that_is_down_or_silent_is_passed_over(
    own_etcd: EtcdServer, shared_etcd: EtcdServer
) -> None:
    async def play(etcd: Etcd) -> None:
        await etcd.get("/k")
        assert etcd.endpoint == own_etcd.address
        own_etcd.stop()
        await etcd.get("/k")
        assert etcd.endpoint == shared_etcd.address
        started = time.monotonic()
        await etcd.get("/k")
        assert time.monotonic() - started < 0.9
        own_etcd.kill()
        with pytest.raises(ops.EtcdUnavailableError, match="etcd at "):
            await Etcd(EtcdOptions(endpoints=(own_etcd.address,))).get("/k")

    down = f"127.0.0.1:{free_ports(1)[0]}"
    endpoints = (down, own_etcd.address, shared_etcd.address)
    with_client(EtcdOptions(endpoints=endpoints, timeout_s=1.0), play)


def test_a_killed_etcd_is_found_again(own_etcd: EtcdServer) -> None:
    async def play(etcd: Etcd) -> None:
        await etcd.txn([], [Put("/k", b"1")])
        own_etcd.kill()
        with pytest.raises(ops.EtcdUnavailableError):
            await etcd.get("/k")
        own_etcd.start()
        found = await once_up(lambda: etcd.get("/k"))
        assert found is not None
        assert found.value == b"1"

    with_client(own_etcd.options, play)


def _password_only(server: EtcdServer) -> None:
    server.ask("auth/user/add", {"name": "root", "password": "secret"})
    server.ask("auth/user/grant", {"user": "root", "role": "root"})
    server.ask("auth/user/add", {"name": "jkv", "password": "word"})
    server.ask("auth/role/add", {"name": "jkv"})
    start, end = (base64.b64encode(key).decode() for key in (b"/jkv/", b"/jkv0"))
    server.ask(
        "auth/role/grant",
        {"name": "jkv", "perm": {"permType": "READWRITE", "key": start, "range_end": end}},
    )
    server.ask("auth/user/grant", {"user": "jkv", "role": "jkv"})
    server.ask("auth/enable", {})


def test_passwords(own_etcd: EtcdServer) -> None:
    address = own_etcd.address

    def options(user: str | None = None, password: str | None = None) -> EtcdOptions:
        return EtcdOptions(endpoints=(address,), user=user, password=password)

    async def put(etcd: Etcd) -> None:
        await etcd.txn([], [Put("/jkv/k", b"")])

    async def strangers(etcd: Etcd) -> None:
        await etcd.txn([], [Put("/other", b"")])

    async def over_a_restart(etcd: Etcd) -> None:
        await put(etcd)
        own_etcd.kill()  # forgets who has logged in
        own_etcd.start(wait=False)
        await once_up(lambda: put(etcd))

    async def watched(etcd: Etcd) -> None:
        watch = etcd.watch("/jkv/", 0)
        await anext(watch)
        await put(etcd)
        assert (await anext(watch)).events[0].kv.key == "/jkv/k"

    with pytest.raises(ops.EtcdAuthError, match="authentication is not enabled"):
        with_client(options("jkv", "word"), put)
    _password_only(own_etcd)
    with_client(options("jkv", "word"), over_a_restart)
    with_client(options("jkv", "word"), watched)
    for wrong in (options(), options("jkv", "wrong"), options("nobody", "word")):
        with pytest.raises(ops.EtcdAuthError):
            with_client(wrong, put)
    with pytest.raises(ops.EtcdAuthError, match="permission denied"):
        with_client(options("jkv", "word"), strangers)


def _openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=60)


def _certificates(directory: Path) -> None:
    """ca.pem, and a pair for both ends that it signed."""
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl(directory, "req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test")
    _openssl(directory, "req", *curve, "-keyout", "one.key", "-out", "one.csr", "-subj", "/CN=one")
    (directory / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "2")
    _openssl(directory, "x509", "-req", "-in", "one.csr", *signing, "-out", "one.pem")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_tls_both_ways(tmp_path: Path) -> None:
    _certificates(tmp_path)
    files = {name: str(tmp_path / name) for name in ("ca.pem", "one.pem", "one.key")}
    flags = ("--client-cert-auth", "--trusted-ca-file", files["ca.pem"])
    flags += ("--cert-file", files["one.pem"], "--key-file", files["one.key"])
    ca, cert, key = ((tmp_path / name).read_bytes() for name in files)

    async def put(etcd: Etcd) -> None:
        await etcd.txn([], [Put("/k", b"")])

    with etcd_server(tmp_path / "etcd", *flags, scheme="https") as server:
        endpoints = (server.address,)
        right = EtcdOptions(endpoints=endpoints, ca=ca, cert=cert, key=key)
        with_client(right, lambda etcd: once_up(lambda: put(etcd)))
        for wrong in (EtcdOptions(endpoints=endpoints), EtcdOptions(endpoints=endpoints, ca=ca)):
            with pytest.raises(ops.EtcdUnavailableError):
                with_client(wrong, put)
