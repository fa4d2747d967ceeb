"""Stop strings in a text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Ends a text before the first stop string that is completed in it, whatever the pieces it comes in.

    Of several that the same character completes, the one that starts first counts. Text that may be the
    start of a stop string is held back, so never more than the longest one. Time is linear in the text
    (Knuth, Morris and Pratt).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "a stop string must not be empty"
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""
        self._stopped = False

    def push(self, delta: str) -> tuple[str, bool]:
        """Returns the text that can be sent now, and whether the text has ended; then nothing follows."""
        if self._stopped or not self._matchers:
            return ("" if self._stopped else delta), self._stopped
        for position, character in enumerate(delta, start=1):
            matched = max(matcher.step(character) for matcher in self._matchers)
            if matched:
                emit = (self._held + delta[:position])[:-matched]
                self._stopped, self._held = True, ""
                return emit, True
        text = self._held + delta
        keep = len(text) - max(matcher.length for matcher in self._matchers)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """The held text, once nothing can follow it; empty after a stop string."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """`length` is how much of the stop string's start the text ends with."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = _borders(stop)
        self.length = 0

    def step(self, character: str) -> int:
        """Take a character; returns the stop string's length if it completes it, else 0."""
        while self.length and self._stop[self.length] != character:
            self.length = self._borders[self.length - 1]
        if self._stop[self.length] == character:
            self.length += 1
        return self.length if self.length == len(self._stop) else 0


def _borders(pattern: str) -> list[int]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    for end in range(1, len(pattern)):
        length = borders[end - 1]
        while length and pattern[length] != pattern[end]:
            length = borders[length - 1]
        borders[end] = length + (pattern[length] == pattern[end])
    return borders
