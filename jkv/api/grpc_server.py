"""An engine's gRPC server: its services, when they serve, and the drain."""

from __future__ import annotations

import asyncio
import contextlib

from jkv.api import jkv_pb2 as pb
from jkv.api.cache_servicer import CacheServicer
from jkv.api.listening import Listener
from jkv.api.prompt import Backend
from jkv.api.replica_servicer import ReplicaServicer
from jkv.api.servicer import GenerationServicer
from jkv.api.serving import Serving

_GENERATION, _CACHE, _REPLICA = "Generation", "Cache", "Replica"
SERVICE, CACHE_SERVICE = (pb.DESCRIPTOR.services_by_name[name].full_name for name in (_GENERATION, _CACHE))
# How long finished streams may take to reach their clients, after the engine has drained.
_DELIVERY_SECONDS = 5.0


class GrpcServer:
    """Listens from `start()` on; health is NOT_SERVING until `open()` and after `close()`."""

    def __init__(self) -> None:
        self._listener = Listener()
        self._serving = Serving()
        self._generation = GenerationServicer(self._serving)
        self._listener.add(_GENERATION, self._generation)
        self._listener.add(_CACHE, CacheServicer(self._serving))
        self._listener.add(_REPLICA, ReplicaServicer(self._serving))

    async def start(self, host: str, port: int) -> int:
        """See `Listener.start`."""
        return await self._listener.start(host, port)

    async def open(self, backend: Backend) -> None:
        """Serve the model: health turns SERVING."""
        self._serving.open(backend)
        await self._listener.serving(True)

    async def close(self) -> None:
        """Health turns NOT_SERVING and new requests are refused; those that run go on."""
        self._serving.close()
        await self._listener.close()

    async def stop(self) -> None:
        """Deliver what finished requests still have to send, then stop listening and end every RPC."""
        await self.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._generation.idle(), _DELIVERY_SECONDS)
        await self._listener.stop()
