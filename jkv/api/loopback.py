"""Whether a caller is on this machine, from what gRPC calls its peer."""

from __future__ import annotations

import ipaddress
from urllib.parse import unquote


def is_loopback(peer: str) -> bool:
    """True for `ipv4:127.0.0.1:5000`, `ipv6:%5B::1%5D:5000` (quoted, as gRPC does) and `unix:...`."""
    kind, _, rest = unquote(peer).partition(":")
    if kind == "unix":
        return True
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # What a socket for both families calls an IPv4 caller.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
