"""Request traces in Mooncake's format, and what plain caches make of them. Pure but for reading the file.

A line is one request: `input_length` tokens, and a hash id for each block of 512 of them, the last one partly
filled. An id stands for a block and all before it: equal ids are equal prefixes.
Source: the traces published with Mooncake (FAST '25).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jkv.errors import ConfigError

BLOCK_TOKENS = 512
_ID_LIMIT = 2**32  # ids stand for tokens, which keys pack into 4 bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRequest:
    """A prompt of `input_length` tokens in `len(hash_ids)` blocks, all full but perhaps the last."""

    input_length: int
    hash_ids: tuple[int, ...]

    @property
    def full_ids(self) -> tuple[int, ...]:
        """The ids of its full blocks."""
        return self.hash_ids[: self.input_length // BLOCK_TOKENS]

    def tokens_of(self, blocks: int) -> int:
        """Tokens in its first `blocks` blocks."""
        return min(blocks * BLOCK_TOKENS, self.input_length)


def read_trace(path: Path) -> list[TraceRequest]:
    """All requests of a file, in order.

    Raises:
        ConfigError: a file that cannot be read, or a line that is not a request; says which and why.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--file {path}: not UTF-8: {error}") from error
    requests = []
    for number, line in enumerate(lines, 1):
        try:
            requests.append(_request(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"--file {path}: line {number} is not a request of Mooncake's format: {error}"
            ) from error
    if not requests:
        raise ConfigError(f"--file {path}: has no requests")
    return requests


def _request(entry: Any) -> TraceRequest:
    length, ids = entry["input_length"], entry["hash_ids"]
    if type(length) is not int or length < 1:
        raise ValueError(f"input_length {length!r} is not a number of tokens")
    if len(ids) != -(-length // BLOCK_TOKENS):
        raise ValueError(f"{len(ids)} hash_ids for {length} tokens in blocks of {BLOCK_TOKENS}")
    if not all(type(i) is int and 0 <= i < _ID_LIMIT for i in ids):
        raise ValueError("hash_ids are not all integers below 2^32")
    return TraceRequest(input_length=length, hash_ids=tuple(ids))


def ideal_hit_tokens(requests: Iterable[TraceRequest]) -> int:
    """Prompt tokens that an infinite cache would serve, were partly filled blocks shared as well."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        hits += request.tokens_of(_leading(request.hash_ids, seen))
        seen.update(request.hash_ids)
    return hits


def lru_hit_tokens(requests: Iterable[TraceRequest], capacity: int) -> int:
    """Prompt tokens that a plain LRU list of `capacity` blocks would serve, partly filled ones as well.

    A prompt's blocks are used from its start: so the list drops them from their start, too.
    """
    blocks: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        hits += request.tokens_of(_leading(request.hash_ids, blocks))
        for block in request.hash_ids:
            blocks[block] = None
            blocks.move_to_end(block)
            if len(blocks) > capacity:
                blocks.popitem(last=False)
    return hits


def _leading(ids: Sequence[int], known: Iterable[int] | Any) -> int:
    """How many of the first ids are known without a gap."""
    for count, block in enumerate(ids):
        if block not in known:
            return count
    return len(ids)
