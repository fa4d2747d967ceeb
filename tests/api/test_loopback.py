from __future__ import annotations

import pytest

from jkv.api.loopback import is_loopback


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:40000", True),
        ("ipv4:127.8.0.1:40000", True),
        ("ipv6:%5B::1%5D:40000", True),
        ("ipv6:[::1]:40000", True),
        ("ipv6:[::ffff:127.0.0.1]:40000", True),
        ("unix:/tmp/socket", True),
        ("unix:", True),
        ("ipv4:192.0.2.7:40000", False),
        ("ipv4:0.0.0.0:40000", False),
        ("ipv6:[2001:db8::1]:40000", False),
        ("ipv6:[::ffff:192.0.2.7]:40000", False),
        ("ipv6:[fe80::1%25eth0]:40000", False),
        ("localhost:40000", False),
        ("unknown", False),
        ("", False),
    ],
)
def test_only_callers_on_this_machine_are_local(peer: str, local: bool) -> None:
    assert is_loopback(peer) is local
