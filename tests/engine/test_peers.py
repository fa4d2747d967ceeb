"""Pages fetched from another engine, over real sockets: right, counted as such, never waited for in vain."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from jkv.api.grpc_server import GrpcServer
from jkv.api.peers import GrpcPeers
from jkv.api.prompt import Backend
from jkv.cache.pages import Tier
from jkv.cache.peers import PeerHint
from tests.engine.harness import Bench, build, random_prompt, request, tiny_checkpoint, wait_for

PAGE = 16


class Served:
    """An engine behind its gRPC server."""

    def __init__(self) -> None:
        self.bench = build(
            tiny_checkpoint("llama3"),
            page_size=PAGE,
            l1_tokens=4096,
            l2_gib=0.01,
            load_policy="always",
            load_timeout=5,
            batch_invariant=True,
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)

    async def _start(self) -> GrpcServer:
        server, engine = GrpcServer(), self.bench.engine
        self.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        await server.open(
            Backend(generator=engine, cache=engine.cache, replica=engine.replica, served_name="llama3")
        )
        return server

    def stop_serving(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(30)

    def stop(self) -> None:
        self.stop_serving()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.bench.stop()


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Bench, Served]]:
    """One that fetches, and one to fetch from, with another one's address being nobody's."""
    peer, mine = Served(), Served()
    client = GrpcPeers(5.0)
    mine.bench.engine.replica.use_peers(client, lambda address: address != "10.255.255.1:1")
    yield mine.bench, peer
    client.close()
    mine.stop()
    peer.stop()


def flush(bench: Bench) -> None:
    asyncio.run(bench.engine.cache.flush([Tier.L1, Tier.L2]))


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, 5 * PAGE + 3, 20 * PAGE])
@pytest.mark.parametrize("where", ["l1", "l2"])
def test_a_prefix_of_a_peer_gives_the_cold_runs_bits(
    engines: tuple[Bench, Served], length: int, where: str
) -> None:
    bench, peer = engines
    flush(bench)
    flush(peer.bench)
    asked = request(random_prompt(length, length), 6)
    expected = peer.bench.one(asked)
    if where == "l2":
        asyncio.run(peer.bench.engine.cache.flush([Tier.L1]))
    hint = PeerHint(address=peer.address, pages=length // PAGE)
    outcome = bench.one(dataclasses.replace(asked, peer=hint))
    assert outcome.bits == expected.bits
    assert outcome.by_tier.peer == outcome.cached == min(length // PAGE * PAGE, length - 1)
    again = bench.one(dataclasses.replace(asked, peer=hint))
    assert again.by_tier.peer == 0
    assert again.by_tier.l1 == outcome.cached
    wait_for(lambda: bench.scheduler.lower.host.held == 0)


def test_what_is_here_is_not_fetched(engines: tuple[Bench, Served]) -> None:
    bench, peer = engines
    flush(bench)
    prompt = random_prompt(77, 8 * PAGE)
    peer.bench.one(request(prompt, 1))
    bench.one(request(prompt[: 3 * PAGE], 1))
    outcome = bench.one(dataclasses.replace(request(prompt, 1), peer=PeerHint(address=peer.address, pages=8)))
    assert (outcome.by_tier.l1, outcome.by_tier.peer) == (3 * PAGE, 5 * PAGE - 1)


@pytest.mark.parametrize(
    ("address", "pages"),
    [
        (lambda peer: "10.255.255.1:1", 6),  # not trusted
        (lambda peer: "127.0.0.1:1", 6),  # nobody listens
        (lambda peer: peer.address, 6),  # has none of them
    ],
    ids=["stranger", "nobody", "lost"],
)
def test_a_peer_that_does_not_help_costs_a_miss(
    engines: tuple[Bench, Served], address: Callable[[Served], str], pages: int
) -> None:
    bench, peer = engines
    asked = request(random_prompt(pages * 100 + 7, pages * PAGE), 4, salt=address(peer))
    expected = bench.cold(asked)
    started = time.monotonic()
    outcome = bench.one(dataclasses.replace(asked, peer=PeerHint(address=address(peer), pages=pages)))
    assert time.monotonic() - started < 20
    assert (outcome.bits, outcome.cached) == (expected.bits, 0)
    wait_for(lambda: bench.scheduler.lower.host.held == 0)


def test_a_prefix_that_a_peer_holds_in_part_is_computed_from_there(engines: tuple[Bench, Served]) -> None:
    bench, peer = engines
    prompt = random_prompt(99, 8 * PAGE)
    peer.bench.one(request(prompt[: 4 * PAGE], 1))
    asked = request(prompt, 4)
    expected = bench.cold(asked)
    outcome = bench.one(dataclasses.replace(asked, peer=PeerHint(address=peer.address, pages=8)))
    assert outcome.bits == expected.bits
    assert outcome.by_tier.peer == 4 * PAGE
    wait_for(lambda: bench.scheduler.lower.host.held == 0)
