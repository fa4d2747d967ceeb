"""A client of etcd's v3 API over grpc.aio, of the few calls that jkv needs.

Own code, because the clients on PyPI do not suit a server that must outlive etcd's faults: `etcd-sdk-python`
is synchronous, watches on threads without deadlines, shuns a failed endpoint for minutes and never logs in
again; `aetcd` knows one endpoint and no TLS. Both register etcd's messages under their global names besides.

Every call has a deadline. A member that does not answer is passed over for the next one; an answer that got
lost leaves open whether the call was done, so callers use conditions that make repeating it harmless. Works
with etcd 3.4 and newer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from jkv.cluster_config import ClusterConfig
from jkv.errors import ConfigError
from jkv.router import etcd_ops as ops
from jkv.router import etcd_rpc_pb2 as pb
from jkv.router.etcd_ops import EtcdUnavailableError, Event, KeyValue, LeaseLostError, Op, TxnResult

T = TypeVar("T")

# Keys of a listing that are asked for at a time; a value of jkv's is about 1 KiB at most.
_PAGE = 1000
# A watch asks for a sign of life when it has heard nothing for so long, and then waits as long as for a call.
_QUIET_S = 2.0
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.max_receive_message_length", 64 * 2**20),
    # Without it, clients of one address would share a connection, and with it its faults.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, kw_only=True)
class EtcdOptions:
    """Where etcd is and how to log in. `ca` turns TLS on; all PEM contents, not paths."""

    endpoints: tuple[str, ...]
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    timeout_s: float = 3.0  # of one call to one member


def etcd_options(config: ClusterConfig) -> EtcdOptions | None:
    """None where `--etcd` is not given.

    Raises:
        ConfigError: names the flag whose file cannot be read.
    """
    if config.etcd is None:
        return None
    password = _read("etcd-password-file", config.etcd_password_file)
    return EtcdOptions(
        endpoints=config.etcd_addresses,
        user=config.etcd_user,
        password=None if password is None else password.decode().rstrip("\r\n"),
        ca=_read("etcd-ca", config.etcd_ca),
        cert=_read("etcd-cert", config.etcd_cert),
        key=_read("etcd-key", config.etcd_key),
    )


@dataclass(frozen=True, kw_only=True)
class WatchBatch:
    """Changes up to a revision; the first of a watch is empty and says that it runs."""

    events: tuple[Event, ...]
    revision: int


class Etcd:
    """All methods raise `EtcdError` or one of its kinds, within `timeout_s` per member; none tries again, but
    with the next member. Belongs to the event loop of its first call.
    """

    def __init__(self, options: EtcdOptions) -> None:
        self._options = options
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._at = 0  # the member that is asked first
        self._token: str | None = None

    @property
    def endpoint(self) -> str:
        """The member that is asked first."""
        return self._options.endpoints[self._at]

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)

    async def get(self, key: str) -> KeyValue | None:
        reply = await self._call("KV/Range", pb.RangeRequest(key=key.encode()), pb.RangeResponse)
        return ops.key_value(reply.kvs[0]) if reply.kvs else None

    async def pages(self, prefix: str) -> AsyncIterator[tuple[list[KeyValue], int]]:
        """All keys under a prefix, as they were at one revision, in pieces with that revision; at least one.

        Raises:
            RevisionGoneError: compacted meanwhile; begin again.
        """
        start, revision, more = prefix.encode(), 0, True
        while more:
            request = pb.RangeRequest(
                key=start, range_end=ops.range_end(prefix), limit=_PAGE, revision=revision
            )
            reply = await self._call("KV/Range", request, pb.RangeResponse)
            revision = revision or reply.header.revision
            yield [ops.key_value(kv) for kv in reply.kvs], revision
            more = reply.more
            if more:
                start = reply.kvs[-1].key + b"\0"

    async def list(self, prefix: str) -> tuple[list[KeyValue], int]:
        """All keys under a prefix, and the revision at which they were so."""
        found: list[KeyValue] = []
        at = 0
        async for page, revision in self.pages(prefix):
            found += page
            at = revision
        return found, at

    async def txn(
        self, compares: Sequence[pb.Compare], then: Sequence[Op], otherwise: Sequence[Op] = ()
    ) -> TxnResult:
        """`then` if all compares hold, else `otherwise`; all at once. etcd takes 128 operations at most."""
        request = ops.txn_request(compares, then, otherwise)
        return ops.txn_result(await self._call("KV/Txn", request, pb.TxnResponse))

    async def grant(self, ttl_s: int) -> int:
        """A new lease's id."""
        reply = await self._call("Lease/LeaseGrant", pb.LeaseGrantRequest(TTL=ttl_s), pb.LeaseGrantResponse)
        return reply.ID

    async def keep_alive(self, lease: int) -> None:
        """Gives a lease its full time again.

        Raises:
            LeaseLostError: it is gone.
        """
        request = pb.LeaseKeepAliveRequest(ID=lease)
        reply = await self._call("Lease/LeaseKeepAlive", request, pb.LeaseKeepAliveResponse, stream=True)
        if reply.TTL <= 0:
            raise LeaseLostError(f"etcd lease {lease:x}: has run out")

    async def revoke(self, lease: int) -> None:
        """Ends a lease and deletes its keys."""
        await self._call("Lease/LeaseRevoke", pb.LeaseRevokeRequest(ID=lease), pb.LeaseRevokeResponse)

    async def watch(self, prefix: str, after: int) -> AsyncGenerator[WatchBatch]:
        """Every change under a prefix after a revision, until an error.

        Raises:
            RevisionGoneError: compacted, or the store has not come that far: its history is another one.
            EtcdUnavailableError: the member went away or is silent; go on with the next one.
        """
        at, endpoint = self._at, self.endpoint
        try:
            async with contextlib.aclosing(self._watch(endpoint, prefix, after)) as batches:
                async for batch in batches:
                    yield batch
        except ops.StaleTokenError:
            self._token = None
            raise
        except EtcdUnavailableError:
            self._pass_over(at)
            raise

    async def _watch(self, endpoint: str, prefix: str, after: int) -> AsyncGenerator[WatchBatch]:
        what = f"etcd at {endpoint}, watch of {prefix}"
        # A member cut off from the others ends the watch then, instead of staying silent.
        metadata = (*await self._login(endpoint), ("hasleader", "true"))
        method = self._channel(endpoint).stream_stream(
            "/etcdserverpb.Watch/Watch",
            request_serializer=pb.WatchRequest.SerializeToString,
            response_deserializer=pb.WatchResponse.FromString,
        )
        call: Any = method(metadata=metadata)
        create = pb.WatchCreateRequest(
            key=prefix.encode(), range_end=ops.range_end(prefix), start_revision=after + 1
        )
        try:
            await asyncio.wait_for(
                call.write(pb.WatchRequest(create_request=create)), self._options.timeout_s
            )
            async with contextlib.aclosing(self._replies(call, what)) as replies:
                async for reply in replies:
                    _check_watch(reply, after, what)
                    if reply.created or reply.events:
                        yield WatchBatch(events=tuple(ops.events(reply)), revision=reply.header.revision)
        except TimeoutError:
            raise EtcdUnavailableError(f"{what}: no answer in time") from None
        except grpc.aio.AioRpcError as error:
            raise ops.error(error.code(), error.details() or "", what) from None
        except asyncio.InvalidStateError:  # grpc's for writing to a call that has ended
            raise EtcdUnavailableError(f"{what}: the connection was lost") from None
        finally:
            call.cancel()

    async def _replies(self, call: Any, what: str) -> AsyncGenerator[pb.WatchResponse]:
        """What a watch's stream says; when it is quiet for long, it is asked for a sign of life."""
        reading = asyncio.ensure_future(call.read())
        asked = True  # the answer to the watch's creation is due
        try:
            while True:
                # Not wait_for: cancelling a read would cancel the whole call.
                done, _ = await asyncio.wait(
                    {reading}, timeout=self._options.timeout_s if asked else _QUIET_S
                )
                if done:
                    reply, asked = reading.result(), False
                    if not isinstance(reply, pb.WatchResponse):  # grpc's mark of the end
                        raise EtcdUnavailableError(f"{what}: the server ended it")
                    reading = asyncio.ensure_future(call.read())
                    yield reply
                elif asked:
                    raise EtcdUnavailableError(f"{what}: no sign of life in time")
                else:
                    progress = pb.WatchRequest(progress_request=pb.WatchProgressRequest())
                    await asyncio.wait_for(call.write(progress), self._options.timeout_s)
                    asked = True
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.RpcError):
                await reading

    async def _call(self, path: str, request: Any, reply_type: type[T], *, stream: bool = False) -> T:
        error: EtcdUnavailableError | None = None
        for _ in self._options.endpoints:
            at, endpoint = self._at, self.endpoint
            try:
                return await self._ask(endpoint, path, request, reply_type, stream)
            except ops.StaleTokenError:
                self._token = None
                return await self._ask(endpoint, path, request, reply_type, stream)
            except EtcdUnavailableError as failed:
                error = failed
                self._pass_over(at)
        assert error is not None
        raise error

    async def _ask(self, endpoint: str, path: str, request: Any, reply_type: type[T], stream: bool) -> T:
        metadata = await self._login(endpoint)
        return await self._send(endpoint, path, request, reply_type, metadata, stream)

    async def _send(
        self,
        endpoint: str,
        path: str,
        request: Any,
        reply_type: Any,
        metadata: tuple[tuple[str, str], ...],
        stream: bool = False,
    ) -> Any:
        what = f"etcd at {endpoint}, {path}"
        channel = self._channel(endpoint)
        make = channel.stream_unary if stream else channel.unary_unary
        method: Any = make(
            f"/etcdserverpb.{path}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply_type.FromString,
        )
        sent = iter((request,)) if stream else request
        try:
            return await method(sent, timeout=self._options.timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise ops.error(error.code(), error.details() or "", what) from None

    async def _login(self, endpoint: str) -> tuple[tuple[str, str], ...]:
        """The metadata by which a member knows the user."""
        if self._options.user is None:
            return ()
        token = self._token
        if token is None:
            request = pb.AuthenticateRequest(name=self._options.user, password=self._options.password or "")
            reply = await self._send(endpoint, "Auth/Authenticate", request, pb.AuthenticateResponse, ())
            token = self._token = str(reply.token)
        return (("token", token),)

    def _pass_over(self, at: int) -> None:
        """The next member comes first from now on, unless another call has moved on already."""
        if self._at == at:
            self._at = (at + 1) % len(self._options.endpoints)

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        channel = self._channels.get(endpoint)
        if channel is None:
            options = self._options
            if options.ca is None:
                channel = grpc.aio.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
            else:
                credentials = grpc.ssl_channel_credentials(options.ca, options.key, options.cert)
                channel = grpc.aio.secure_channel(endpoint, credentials, options=_CHANNEL_OPTIONS)
            self._channels[endpoint] = channel
        return channel


def _check_watch(reply: pb.WatchResponse, after: int, what: str) -> None:
    if reply.compact_revision:
        raise ops.RevisionGoneError(f"{what}: compacted up to revision {reply.compact_revision}")
    if reply.canceled:
        raise ops.error(None, reply.cancel_reason or "the server ended it", what)
    if reply.created and reply.header.revision < after:
        raise ops.RevisionGoneError(
            f"{what}: the store is at revision {reply.header.revision}, before {after}: it was reset"
        )


def _read(flag_name: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--{flag_name} {path}: cannot be read: {error.strerror or error}") from None
