"""The flags that say which cluster an engine or a router belongs to, and how to reach its etcd."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jkv.errors import ConfigError
from jkv.flags import flag

_GROUP = "cluster"
_ADDRESS = re.compile(r"([^\s:/\[\],]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def parse_addresses(name: str, text: str) -> tuple[str, ...]:
    """`HOST:PORT,...` of the flag `name`.

    Raises:
        ConfigError: a part is not HOST:PORT, or is there twice.
    """
    addresses = tuple(part.strip() for part in text.split(","))
    for address in addresses:
        if not _ADDRESS.fullmatch(address) or int(address.rpartition(":")[2]) > 65535:
            raise ConfigError(f"--{name} {text!r}: {address!r} is not HOST:PORT, as in 127.0.0.1:2379")
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"--{name} {text!r}: an address is there twice")
    return addresses


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The part of a process's configuration that its membership reads."""

    etcd: str | None = flag(
        group=_GROUP,
        metavar="HOST:PORT,...",
        default_text="no etcd",
        help="the etcd servers through which engines and routers find each other",
    )
    cluster: str = flag(
        "default",
        group=_GROUP,
        metavar="NAME",
        help="which of the clusters in etcd: letters, digits, '.', '_' and '-'",
    )
    etcd_user: str | None = flag(group=_GROUP, metavar="NAME", help="the user to log in to etcd as")
    etcd_password_file: str | None = flag(
        group=_GROUP, metavar="FILE", help="a file with that user's password"
    )
    etcd_ca: str | None = flag(
        group=_GROUP, metavar="FILE", help="PEM file of who signed etcd's certificate; turns TLS on"
    )
    etcd_cert: str | None = flag(
        group=_GROUP, metavar="FILE", help="PEM file of this process's own certificate for etcd"
    )
    etcd_key: str | None = flag(group=_GROUP, metavar="FILE", help="PEM file of that certificate's key")

    @property
    def etcd_addresses(self) -> tuple[str, ...]:
        """Empty without etcd."""
        return () if self.etcd is None else parse_addresses("etcd", self.etcd)

    def check_cluster(self) -> None:
        """What single ranges and choices do not say.

        Raises:
            ConfigError: an unusable address or name, or flags that need another one.
        """
        _ = self.etcd_addresses
        if not _NAME.fullmatch(self.cluster):
            raise ConfigError(f"--cluster {self.cluster!r}: must be 1 to 64 letters, digits, '.', '_' or '-'")
        for name in ("user", "password_file", "ca", "cert", "key"):
            if self.etcd is None and getattr(self, f"etcd_{name}") is not None:
                raise ConfigError(f"--etcd-{name.replace('_', '-')}: needs --etcd")
        for one, other in (("user", "password_file"), ("cert", "key")):
            if (getattr(self, f"etcd_{one}") is None) != (getattr(self, f"etcd_{other}") is None):
                raise ConfigError(
                    f"--etcd-{one} and --etcd-{other.replace('_', '-')}: give both of them, or neither"
                )
        if self.etcd_cert is not None and self.etcd_ca is None:
            raise ConfigError("--etcd-cert: needs --etcd-ca, without which there is no TLS")
