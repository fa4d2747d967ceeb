"""A gRPC server with health and reflection, and its socket: the same for engines and routers."""

from __future__ import annotations

import socket

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jkv.api import jkv_pb2 as pb
from jkv.api.decode import deserializer
from jkv.errors import ConfigError

# A prompt far over any model's length still gets an answer that counts its tokens.
MAX_MESSAGE_BYTES = 64 * 2**20
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # else a second server would share the port unnoticed
)
_STATUS_SECONDS = 0.5


class Listener:
    """Listens from `start()` on; health is NOT_SERVING until it is set to serve."""

    def __init__(self) -> None:
        self._server = grpc.aio.server(options=_OPTIONS)
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._names: list[str] = []
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def add(self, name: str, servicer: object) -> None:
        """Offer the proto's service of this name. Call it before `start`."""
        service: ServiceDescriptor = pb.DESCRIPTOR.services_by_name[name]
        _add_service(servicer, service, self._server)
        self._names.append(service.full_name)

    async def start(self, host: str, port: int) -> int:
        """Listen; port 0 picks a free one. Returns the port.

        Raises:
            ConfigError: the address cannot be bound; names the flag and why.
        """
        names = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        await self.serving(False)
        if failure := _bind_failure(host, port):
            raise ConfigError(failure)
        try:
            bound = self._server.add_insecure_port(join_address(host, port))
        except RuntimeError:
            raise ConfigError(f"--grpc-port {port}: gRPC cannot listen on {host}") from None
        await self._server.start()
        return bound

    async def serving(self, yes: bool) -> None:
        """Set the health of the server and of each service."""
        serving = health_pb2.HealthCheckResponse.ServingStatus
        for name in ("", *self._names):
            await self._health.set(name, serving.SERVING if yes else serving.NOT_SERVING)

    async def close(self) -> None:
        """Health turns NOT_SERVING for good."""
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Stop listening and end every RPC."""
        await self._server.stop(_STATUS_SECONDS)


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
