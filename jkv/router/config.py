"""The router's one configuration object, read once at the top of the process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jkv import flags
from jkv.cluster_config import ClusterConfig, parse_addresses
from jkv.errors import ConfigError
from jkv.flags import flag
from jkv.router.policy import POLICIES
from jkv.server_config import ServerConfig, grpc_port_flag

_ROUTING = "routing"


@dataclass(frozen=True, kw_only=True)
class _RoutingConfig:
    """The part of `RouterConfig` that says which engines there are and how they are chosen."""

    engines: str | None = flag(
        group="cluster",
        metavar="HOST:PORT,...",
        default_text="those in etcd",
        help="a fixed set of engines, instead of etcd",
    )

    policy: str = flag(
        "cache-aware",
        group=_ROUTING,
        choices=POLICIES,
        help="which engine a request goes to: the one expected to answer soonest, or another one, to compare",
    )
    max_in_flight: int = flag(
        4096, group=_ROUTING, minimum=1, help="requests at a time; one more is refused as overload"
    )
    suspect_after: float = flag(
        3.0,
        group=_ROUTING,
        metavar="SECONDS",
        minimum=0.1,
        help="an engine that is silent for this long gets no new requests; after twice that, those it has go "
        "on elsewhere",
    )


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ServerConfig, _RoutingConfig, ClusterConfig):
    """Everything `python -m jkv.router` can be told; of its bases the last one's flags come first in help.

    Raises:
        ConfigError: a value out of its range, or values that contradict each other.
    """

    grpc_port: int = grpc_port_flag(50050)

    def __post_init__(self) -> None:
        flags.check(self)
        self.check_cluster()
        self.check_server()
        if (self.etcd is None) == (self.engines is None):
            raise ConfigError("give either --etcd HOST:PORT, or --engines HOST:PORT,... for a fixed set")
        _ = self.engine_addresses

    @property
    def engine_addresses(self) -> tuple[str, ...]:
        """Empty where etcd says them."""
        return () if self.engines is None else parse_addresses("engines", self.engines)


def parse_config(argv: Sequence[str] | None = None) -> RouterConfig:
    """The configuration of `python -m jkv.router`; see `jkv.flags.parse` for what it raises."""
    return flags.parse(
        RouterConfig,
        argv,
        prog="python -m jkv.router",
        description="Route requests to the engine of a cluster that answers soonest.",
    )
