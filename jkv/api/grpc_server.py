"""The gRPC server around the servicers: handlers, health, reflection, the listening socket, the drain."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jkv.api import jkv_pb2 as pb
from jkv.api.cache_servicer import CacheServicer
from jkv.api.decode import deserializer
from jkv.api.prompt import Backend
from jkv.api.servicer import GenerationServicer
from jkv.api.serving import Serving
from jkv.errors import ConfigError

_GENERATION, _CACHE = (pb.DESCRIPTOR.services_by_name[name] for name in ("Generation", "Cache"))
SERVICE, CACHE_SERVICE = _GENERATION.full_name, _CACHE.full_name
# A prompt far over any model's length still gets an answer that counts its tokens.
MAX_MESSAGE_BYTES = 64 * 2**20
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # else a second server would share the port unnoticed
)
# How long finished streams may take to reach their clients, after the engine has drained.
_DELIVERY_SECONDS = 5.0
_STATUS_SECONDS = 0.5


class GrpcServer:
    """Listens from `start()` on; health is NOT_SERVING until `open()` and after `close()`."""

    def __init__(self) -> None:
        self._server = grpc.aio.server(options=_OPTIONS)
        self._serving = Serving()
        self._generation = GenerationServicer(self._serving)
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        _add_service(self._generation, _GENERATION, self._server)
        _add_service(CacheServicer(self._serving), _CACHE, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, CACHE_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int) -> int:
        """Listen; port 0 picks a free one. Returns the port.

        Raises:
            ConfigError: the address cannot be bound; names the flag and why.
        """
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        if failure := _bind_failure(host, port):
            raise ConfigError(failure)
        try:
            bound = self._server.add_insecure_port(join_address(host, port))
        except RuntimeError:
            raise ConfigError(f"--grpc-port {port}: gRPC cannot listen on {host}") from None
        await self._server.start()
        return bound

    async def open(self, backend: Backend) -> None:
        """Serve the model: health turns SERVING."""
        self._serving.open(backend)
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Health turns NOT_SERVING and new requests are refused; those that run go on."""
        self._serving.close()
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Deliver what finished requests still have to send, then stop listening and end every RPC."""
        await self.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._generation.idle(), _DELIVERY_SECONDS)
        await self._server.stop(_STATUS_SECONDS)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", SERVICE, CACHE_SERVICE):
            await self._health.set(name, status)


def join_address(host: str, port: int) -> str:
    """`host:port`, with the brackets that IPv6 needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _add_service(servicer: object, service: ServiceDescriptor, server: grpc.aio.Server) -> None:
    """As the generated code does, but with deserializers whose failures the servicer can explain."""
    handlers = {}
    for method in service.methods:
        handler = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        handlers[method.name] = handler(
            getattr(servicer, method.name),
            deserializer(GetMessageClass(method.input_type)),
            GetMessageClass(method.output_type).SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def _bind_failure(host: str, port: int) -> str:
    """Why nothing can listen there, or "". gRPC does not say it, and writes its failure to stderr."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return f"--host {host}: no such address ({error})"
    reason = ""
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen()
        except OSError as error:
            reason = f"--grpc-port {port}: cannot listen on {host}: {error.strerror}; 0 picks a free port"
        else:
            return ""
    return reason
