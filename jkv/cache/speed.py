"""Smoothed speeds from single measurements. Pure; recent measurements count more, old ones fade."""

from __future__ import annotations

_KEEP = 0.9  # of a measurement's weight after the next one: about the last ten count


class Speed:
    """Amount per second over the last measurements, each weighted by its size."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    @property
    def per_s(self) -> float:
        """0 before the first measurement."""
        return self._amount / self._seconds if self._seconds else 0.0

    def record(self, amount: float, seconds: float) -> None:
        self._amount = _KEEP * self._amount + amount
        self._seconds = _KEEP * self._seconds + max(seconds, 1e-9)  # coarse clocks measure 0


class LinearCost:
    """Seconds as a fixed part plus a part per unit: a least-squares line through the last measurements."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def measured(self) -> bool:
        return self._weight > 0

    @property
    def per_s(self) -> float:
        """Amount per second, all in all; 0 before the first measurement."""
        return self._x / self._y if self._y else 0.0

    def record(self, amount: float, seconds: float) -> None:
        self._weight = _KEEP * self._weight + 1
        self._x = _KEEP * self._x + amount
        self._y = _KEEP * self._y + seconds
        self._xx = _KEEP * self._xx + amount * amount
        self._xy = _KEEP * self._xy + amount * seconds

    def seconds(self, amount: float) -> float:
        """The expected time for `amount`; 0 before the first measurement."""
        if not self.measured:
            return 0.0
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        # Amounts that hardly differ tell nothing of the fixed part: then all time is per unit.
        slope = y / x if variance < 0.01 * x * x else (self._xy / self._weight - x * y) / variance
        slope = min(max(slope, 0.0), y / x)  # noise must make neither part negative
        return y - slope * x + slope * amount
