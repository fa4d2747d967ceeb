"""How much may be written: a pace, and a limit for each day that a restart does not forget. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable

DAY_S = 86_400
_SAVES_PER_DAY = 256


class WriteBudget:
    """Owner: whoever serializes the calls.

    `clock` gives seconds that never go back, `wall` those since the epoch; days are those of UTC. What is
    saved is always at least what was spent, in steps of 1/256 of the daily limit, so that a crash can waste a
    step of the budget and never exceeds it.
    """

    def __init__(
        self,
        *,
        bytes_per_s: float | None,
        daily_bytes: int | None,
        clock: Callable[[], float],
        wall: Callable[[], float],
        saved: bytes | None = None,
    ) -> None:
        self._bytes_per_s, self._daily_bytes = bytes_per_s, daily_bytes
        self._clock, self._wall = clock, wall
        self._free_at = clock()  # when the next write may start
        self._day, self._spent = self._today(), 0
        if saved is not None:
            day, spent = _decode(saved)
            if day >= self._day:
                self._day, self._spent = day, spent
        self._saved = self._spent

    def reserve(self, size: int) -> float | None:
        """Takes `size` bytes; returns the seconds to wait before writing, None where the day's are spent."""
        now = self._clock()
        today = self._today()
        if today > self._day:
            self._day, self._spent, self._saved = today, 0, 0
        if self._daily_bytes is not None and self._spent + size > self._daily_bytes:
            return None
        self._spent += size
        if self._bytes_per_s is None:
            return 0.0
        start = max(now, self._free_at)
        self._free_at = start + size / self._bytes_per_s
        return start - now

    @property
    def unsaved(self) -> bool:
        """Whether to save `state()` before the bytes last reserved are written."""
        return self._daily_bytes is not None and self._spent > self._saved

    def state(self) -> bytes:
        """What to save and give back as `saved`: the bytes spent and a step more, which counts as saved."""
        assert self._daily_bytes is not None
        step = self._daily_bytes // _SAVES_PER_DAY
        self._saved = min(self._spent + step, self._daily_bytes)
        return _encode(self._day, self._saved)

    def final_state(self) -> bytes:
        """What to save when no more will be written: exactly the bytes spent."""
        return _encode(self._day, self._spent)

    def _today(self) -> int:
        return int(self._wall() // DAY_S)


def _encode(day: int, spent: int) -> bytes:
    return json.dumps({"day": day, "bytes": spent}).encode()


def _decode(saved: bytes) -> tuple[int, int]:
    """The day and its bytes; the start of all days where a crash damaged what was saved."""
    try:
        state = json.loads(saved)
        return int(state["day"]), int(state["bytes"])
    except (ValueError, KeyError, TypeError):
        return 0, 0
