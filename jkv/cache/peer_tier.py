"""Pages that other engines hold: fetched where a router has seen them, and verified like those of L3. No jax.

Owner: the engine's thread. The client's own threads fetch and verify.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from jkv.cache.breaker import Breaker
from jkv.cache.l3 import format
from jkv.cache.l3.format import StoreIdentity
from jkv.cache.page_codec import PageCodec
from jkv.cache.pages import PageInfo
from jkv.cache.peers import PeerClient

_log = logging.getLogger(__name__)

# Addresses whose breakers are remembered; engines come and go.
_KNOWN = 256


class PeerTier:
    """Fetches runs of consecutive pages; a peer that fails repeatedly is left alone for a while.

    `post` has a function called on the engine's thread; `trusts` says whether an address is one of the
    cluster's engines.
    """

    def __init__(
        self,
        client: PeerClient,
        identity: StoreIdentity,
        codec: PageCodec,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        trusts: Callable[[str], bool],
    ) -> None:
        self.errors: Counter[str] = Counter()
        self._client, self._identity, self._codec = client, identity, codec
        self._post, self._clock, self._trusts = post, clock, trusts
        self._breakers: OrderedDict[str, Breaker] = OrderedDict()

    def allows(self, address: str) -> bool:
        """Whether to ask this peer now. Pages of strangers could be verified, but not believed."""
        if not self._trusts(address):
            self.errors["untrusted"] += 1
            return False
        return self._breaker(address).allows()

    def note_late(self, address: str) -> None:
        """A page of a fetch that is under way has not come when it would have been of use."""
        self.errors["late"] += 1
        self._breaker(address).failed()

    def fetch(
        self,
        address: str,
        infos: Sequence[PageInfo],
        arrived: Callable[[Any], None],
        ended: Callable[[], None],
    ) -> Callable[[], None]:
        """Has `arrived` called on the engine's thread with the payload of each page that came and is right,
        in order from the first, then `ended`. Returns a function that cancels it.
        """
        came = 0
        wrong = ""

        def page(data: bytes) -> None:
            nonlocal came, wrong
            if wrong or came >= len(infos):
                return
            reason = format.verify(self._identity, infos[came], data)
            if reason is not None:
                wrong = reason.value
                return
            payload = self._codec.page_from_bytes(format.payload(data))
            came += 1
            self._post(lambda: arrived(payload))

        def end(failure: str) -> None:
            self._post(lambda: self._ended(address, wrong or failure, ended))

        keys = [info.key for info in infos]
        return self._client.fetch(address, self._identity.model_root, keys, page, end)

    def _ended(self, address: str, failure: str, ended: Callable[[], None]) -> None:
        breaker = self._breaker(address)
        if failure and failure != "cancelled":
            self.errors[failure] += 1
            breaker.failed()
            _log.debug("fetching pages from %s: %s", address, failure)
        elif not failure:
            breaker.succeeded()
        ended()

    def _breaker(self, address: str) -> Breaker:
        breaker = self._breakers.setdefault(address, Breaker(self._clock))
        self._breakers.move_to_end(address)
        if len(self._breakers) > _KNOWN:
            self._breakers.popitem(last=False)
        return breaker
