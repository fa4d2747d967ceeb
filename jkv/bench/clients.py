"""The one interface to what is measured; `grpc_client` and `http_client` implement it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from jkv.bench.load import Prompt
from jkv.errors import ConfigError, JkvError

CONNECT_TIMEOUT_S = 5.0

_ALLOWED = "expected grpc://HOST:PORT or http://HOST:PORT[/v1]"


class TargetError(JkvError):
    """The target cannot be reached or does not speak the protocol: nothing can be measured."""


class RequestFailedError(JkvError):
    """One request failed; the benchmark counts it and goes on."""


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """The model under test; None is what the protocol does not tell."""

    model: str
    vocab_size: int | None = None
    max_model_len: int | None = None
    page_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The server's own counts, None what it does not report; `cached_by_tier` sums up to `cached_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    cached_by_tier: Mapping[str, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """One message of a stream: how many tokens it brought, and what the last ones carry.

    `token_ids` are theirs where the protocol tells.
    """

    tokens: int = 0
    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    usage: Usage | None = None


class Client(Protocol):
    """A connection to the target, for any number of concurrent requests."""

    async def describe(self, model: str | None) -> TargetInfo:
        """Describe the named model, or the only one when `model` is None.

        Raises:
            TargetError: no answer within `CONNECT_TIMEOUT_S`, or not the protocol.
            ConfigError: the target does not serve `model`, or `model` is None and it serves several.
        """
        ...

    def stream(
        self, model: str, prompt: Prompt, output_len: int, *, ignore_eos: bool = True
    ) -> AsyncGenerator[Chunk]:
        """Generate greedily `output_len` tokens, or fewer where an end token may end it.

        Raises:
            RequestFailedError: the server refused or broke off the request.
        """
        ...

    async def close(self) -> None: ...


def open_client(target: str) -> Client:
    """Choose the client by the target's scheme. Nothing is sent yet; call it inside the event loop.

    Raises:
        ConfigError: not a target, or an HTTP one without the `bench` extra installed.
    """
    parts = urlsplit(target)
    try:
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--target {target}: {error}; {_ALLOWED}") from None
    if not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"--target {target}: {_ALLOWED}")
    if parts.scheme == "grpc" and port is not None and parts.path in ("", "/"):
        from jkv.bench.grpc_client import GrpcClient

        return GrpcClient(parts.netloc)
    if parts.scheme in ("http", "https"):
        try:
            from jkv.bench.http_client import HttpClient
        except ImportError as error:
            if error.name != "httpx2":
                raise
            raise ConfigError(f"--target {target}: needs httpx2; run: pip install 'jkv[bench]'") from error
        return HttpClient(f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}")
    raise ConfigError(f"--target {target}: {_ALLOWED}")


def choose_model(asked: str | None, served: Sequence[str]) -> str:
    """The model to measure, out of those that the target serves.

    Raises:
        ConfigError: `asked` is not served, or is None while several are.
        TargetError: none is served.
    """
    if not served:
        raise TargetError("the target serves no model")
    if asked is None and len(served) > 1:
        raise ConfigError(f"--model: the target serves several, give one of {', '.join(served)}")
    if asked is not None and asked not in served:
        raise ConfigError(f"--model {asked}: the target serves {', '.join(served)}")
    return asked or served[0]
