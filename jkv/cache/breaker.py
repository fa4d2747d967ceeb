"""Takes a tier that keeps failing out of service until it has recovered. No I/O; the clock is injected."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

FAILURES_TO_OPEN = 3  # in a row
FIRST_COOL_DOWN_S = 1.0
LONGEST_COOL_DOWN_S = 60.0


class BreakerState(StrEnum):
    CLOSED = "closed"  # in service
    OPEN = "open"  # not asked
    HALF_OPEN = "half-open"  # asked once, to see


class Breaker:
    """Opens after failures in a row; after a cool-down one operation probes the tier.

    The probe's success closes it, its failure opens it again for twice as long, up to a bound. Owner: the
    engine's thread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._cool_down = FIRST_COOL_DOWN_S
        self._retry_at = 0.0

    @property
    def state(self) -> BreakerState:
        return self._state

    def allows(self) -> bool:
        """Whether to use the tier now. True while half-open makes the operation the probe.

        A probe without an outcome, as after a cancellation, is followed by another after a cool-down.
        """
        if self._state is BreakerState.CLOSED:
            return True
        if self._clock() < self._retry_at:
            return False
        self._state = BreakerState.HALF_OPEN
        self._retry_at = self._clock() + self._cool_down
        return True

    def succeeded(self) -> None:
        """An operation ended well. While open it is one from before, and tells nothing."""
        if self._state is BreakerState.OPEN:
            return
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._cool_down = FIRST_COOL_DOWN_S

    def failed(self) -> None:
        """An operation failed or ran out of time."""
        if self._state is BreakerState.OPEN:
            return
        self._failures += 1
        if self._state is BreakerState.HALF_OPEN:
            self._cool_down = min(2 * self._cool_down, LONGEST_COOL_DOWN_S)
        elif self._failures < FAILURES_TO_OPEN:
            return
        self._state = BreakerState.OPEN
        self._retry_at = self._clock() + self._cool_down
