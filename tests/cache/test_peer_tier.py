from __future__ import annotations

from collections.abc import Callable

from jkv.cache.breaker import FAILURES_TO_OPEN, FIRST_COOL_DOWN_S
from jkv.cache.peer_tier import PeerTier
from tests.cache.clock import Clock
from tests.cache.l3.pages import chain, identity
from tests.cache.tiers import ByteCodec

MODEL = identity()
THERE, ELSEWHERE, STRANGER = "there:1", "elsewhere:1", "stranger:1"


class HangingClient:
    """Gets no answer; a fetch that is cancelled says so."""

    def fetch(
        self, address: str, model_root: bytes, keys: object, page: object, ended: Callable[[str], None]
    ) -> Callable[[], None]:
        return lambda: ended("cancelled")


def test_a_peer_whose_pages_are_always_late_is_left_alone() -> None:
    clock, calls, ended = Clock(), [], []
    trusted = {THERE, ELSEWHERE}
    peers = PeerTier(HangingClient(), MODEL, ByteCodec(), calls.append, clock, trusted.__contains__)
    for number in range(FAILURES_TO_OPEN):
        assert peers.allows(THERE)
        cancel = peers.fetch(THERE, chain(MODEL, 2), lambda payload: None, lambda: ended.append(True))
        peers.note_late(THERE)
        cancel()
        while calls:
            calls.pop()()
        assert len(ended) == number + 1
    assert not peers.allows(THERE)
    assert peers.allows(ELSEWHERE)
    assert not peers.allows(STRANGER)
    assert peers.errors == {"late": FAILURES_TO_OPEN, "untrusted": 1}
    clock.now += FIRST_COOL_DOWN_S
    assert peers.allows(THERE), "it is tried again"
