"""Fetching pages from other engines over gRPC."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.api.listening import MAX_MESSAGE_BYTES

_THREADS = 4
_CHANNELS = 64  # engines that connections are kept to
_OPTIONS = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),)


class GrpcPeers:
    """Implements `jkv.cache.peer_tier.PeerClient`. `deadline_s` bounds a fetch."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="peer")
        self._lock = threading.Lock()  # guards _channels
        self._channels: OrderedDict[str, grpc.Channel] = OrderedDict()

    def fetch(
        self,
        address: str,
        model_root: bytes,
        keys: Sequence[bytes],
        page: Callable[[bytes], None],
        ended: Callable[[str], None],
    ) -> Callable[[], None]:
        """See `PeerClient.fetch`."""
        fetch = _Fetch(page, ended)
        request = pb.FetchPagesRequest(model_root=model_root, keys=b"".join(keys))
        self._threads.submit(fetch.run, self._stub(address), request, self._deadline_s)
        return fetch.cancel

    def close(self) -> None:
        """Ends what runs."""
        with self._lock:
            channels, self._channels = self._channels, OrderedDict()
        for channel in channels.values():
            channel.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _stub(self, address: str) -> pb_grpc.ReplicaStub:
        with self._lock:
            channel = self._channels.get(address)
            if channel is None:
                channel = self._channels[address] = grpc.insecure_channel(address, options=_OPTIONS)
            self._channels.move_to_end(address)
            while len(self._channels) > _CHANNELS:
                self._channels.popitem(last=False)[1].close()
        return pb_grpc.ReplicaStub(channel)


class _Fetch:
    """One call. Cancelled before its turn has come it ends at once, for what it holds may be wanted."""

    def __init__(self, page: Callable[[bytes], None], ended: Callable[[str], None]) -> None:
        self._page, self._ended = page, ended
        self._lock = threading.Lock()  # guards the other two
        self._cancelled = False
        self._call: Any = None

    def cancel(self) -> None:
        with self._lock:
            first, self._cancelled = not self._cancelled, True
            call = self._call
        if call is not None:
            call.cancel()
        elif first:
            self._ended("cancelled")

    def run(self, stub: pb_grpc.ReplicaStub, request: pb.FetchPagesRequest, deadline_s: float) -> None:
        failure = ""
        try:
            with self._lock:
                if self._cancelled:
                    return
                self._call = stub.FetchPages(request, timeout=deadline_s)
            for message in self._call:
                self._page(message.object)
            failure = "cancelled" if self._cancelled else ""
        except grpc.RpcError as error:
            failure = "cancelled" if self._cancelled else error.code().name.lower()  # type: ignore[attr-defined]
        except Exception as error:
            failure = type(error).__name__
        self._ended(failure)
