"""Looking now and then at what other owners of a store have written, on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from jkv.cache.l3.names import StoredPage
from jkv.cache.l3.objects import ObjectError

_log = logging.getLogger(__name__)

# Listing takes a twentieth of one core at most, and news is a second old where that allows it.
_PAUSE_PER_SECOND = 20.0
_PAUSE_S = (1.0, 60.0)


class Watch:
    """Calls `found` with other owners' pages whenever these have changed, until closed.

    `look` lists them; it is called on the thread, as `found` is.
    """

    def __init__(
        self, look: Callable[[], list[StoredPage]], found: Callable[[list[StoredPage]], None]
    ) -> None:
        self._look, self._found = look, found
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="l3-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread without waiting for a listing under way."""
        self._closing.set()

    def _run(self) -> None:
        last: frozenset[StoredPage] | None = None
        pause = _PAUSE_S[0]
        while not self._closing.wait(pause):
            started = time.monotonic()
            try:
                pages = self._look()
            except ObjectError as error:
                _log.debug("L3 could not be listed: %s", error)
                pause = _PAUSE_S[1]
                continue
            except Exception:
                _log.exception("L3 could not be listed")
                pause = _PAUSE_S[1]
                continue
            pause = min(max(_PAUSE_PER_SECOND * (time.monotonic() - started), _PAUSE_S[0]), _PAUSE_S[1])
            if last != (now := frozenset(pages)) and not self._closing.is_set():
                last = now
                self._found(pages)
