"""The flags that every server has, an engine or a router: where it listens, and how it ends and logs."""

from __future__ import annotations

from dataclasses import dataclass

from jkv.errors import ConfigError
from jkv.flags import flag

_GROUP = "server"
_LEVELS = ("debug", "info", "warning", "error")


def grpc_port_flag(default: int) -> int:
    return flag(
        default,
        group=_GROUP,
        metavar="PORT",
        minimum=0,
        maximum=65535,
        help="gRPC port; 0 picks a free one",
    )


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The part of a process's configuration that listening, stopping and logging read."""

    host: str = flag("127.0.0.1", group=_GROUP, help="address to listen on; 0.0.0.0 for all of IPv4")
    grpc_port: int = grpc_port_flag(50051)
    metrics_port: int | None = flag(
        group=_GROUP,
        metavar="PORT",
        minimum=0,
        maximum=65535,
        default_text="no metrics",
        help="HTTP port of /metrics, in Prometheus' text format; 0 picks a free one, which the log names",
    )
    drain_timeout: float = flag(
        30.0,
        group=_GROUP,
        metavar="SECONDS",
        minimum=0,
        help="how long running requests may go on after SIGTERM before they are cancelled",
    )
    log_level: str = flag("info", group=_GROUP, choices=_LEVELS, help="least severe messages to log")

    def check_server(self) -> None:
        """What single ranges and choices do not say.

        Raises:
            ConfigError: an empty address.
        """
        if not self.host.strip():
            raise ConfigError(f"--host {self.host!r}: must not be empty")
