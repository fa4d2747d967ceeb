"""The client for other engines' pages, where they do not answer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.api.peers import _THREADS, GrpcPeers

WAIT_S = 10.0


class Silent(pb_grpc.ReplicaServicer):
    """Takes calls and answers none."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.stop = threading.Event()

    def FetchPages(
        self, request: pb.FetchPagesRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.PageData]:
        self.calls.put(request.keys)
        self.stop.wait(WAIT_S)
        yield from ()


@pytest.fixture
def silent() -> Iterator[tuple[Silent, str]]:
    servicer = Silent()
    server = grpc.server(futures.ThreadPoolExecutor(2 * _THREADS))
    pb_grpc.add_ReplicaServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    servicer.stop.set()
    server.stop(0)


def test_a_cancelled_fetch_ends_at_once_also_while_it_waits_for_its_turn(silent: tuple[Silent, str]) -> None:
    servicer, address = silent
    peers = GrpcPeers(WAIT_S)
    ended: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def fetch(number: int) -> object:
        key = number.to_bytes(16, "big")
        return peers.fetch(address, bytes(16), [key], lambda _: None, lambda how: ended.put((number, how)))

    cancels = [fetch(number) for number in range(_THREADS + 2)]
    for _ in range(_THREADS):
        servicer.calls.get(timeout=WAIT_S)
    waiting, running = cancels[_THREADS], cancels[0]
    assert callable(waiting)
    assert callable(running)
    for _ in range(2):
        waiting()
    assert ended.get(timeout=0) == (_THREADS, "cancelled")
    running()
    assert ended.get(timeout=WAIT_S / 2) == (0, "cancelled")
    asked = servicer.calls.get(timeout=WAIT_S)
    assert int.from_bytes(asked, "big") == _THREADS + 1, "a cancelled fetch is made"
    assert ended.empty(), "a fetch ends twice"
    peers.close()
