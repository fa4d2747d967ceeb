"""What an infinite cache would serve. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from jkv.cache.keys import page_keys

_ROOT = b"ideal"


class IdealCache:
    """Every full page of every sequence so far, for ever."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._keys: set[bytes] = set()

    @property
    def pages(self) -> int:
        return len(self._keys)

    def hit_tokens(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that it serves: never the last one, whose logits are needed."""
        matched = 0
        for key in page_keys(_ROOT, prompt, self._page_size):
            if key not in self._keys:
                break
            matched += self._page_size
        return min(matched, len(prompt) - 1)

    def add(self, prompt: Sequence[int], output_ids: Sequence[int]) -> None:
        """Keeps a finished request; its last token was never an input, so it has no keys and values."""
        self._keys.update(page_keys(_ROOT, [*prompt, *output_ids][:-1], self._page_size))
