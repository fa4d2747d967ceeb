"""How many writes to etcd a page costs: a store that is filled, then one that is full and evicts. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from jkv.router.extents import ExtentMap

_PROMPT_PAGES = 32
_PROMPTS_AT_ONCE = 32  # between two writes of records
_OPS = 128  # of one transaction


@dataclass(frozen=True, kw_only=True)
class RecordResults:
    """Puts and deletes for each page written to the store."""

    filling: float
    churning: float


def measure(capacity: int, seed: int) -> RecordResults:
    """Fills a store of `capacity` pages with prompts, then writes as many again into it.

    For each page written then, the last page of some prompt is evicted, whenever that was written: as if all
    prompts were used again and again.
    """
    chance, extents = random.Random(seed), ExtentMap()
    extents.finish_load(0)
    held = [_keys(number) for number in range(max(capacity // _PROMPT_PAGES, 1))]
    for number, keys in enumerate(held):
        _add(extents, number, keys)
    filled = extents.stats
    for number in range(len(held), 2 * len(held)):
        for _ in range(_PROMPT_PAGES):
            place = chance.randrange(len(held))
            extents.remove([held[place].pop()])
            if not held[place]:
                held[place] = held[-1]
                held.pop()
        held.append(_keys(number))
        _add(extents, number, held[-1])
    after = extents.stats
    return RecordResults(
        filling=(filled.puts + filled.deletes) / filled.pages_added,
        churning=(after.puts + after.deletes - filled.puts - filled.deletes)
        / (after.pages_added - filled.pages_added),
    )


def _add(extents: ExtentMap, number: int, keys: Iterable[bytes]) -> None:
    extents.add(keys)
    if number % _PROMPTS_AT_ONCE == 0:
        while ops := extents.plan(_OPS):
            extents.commit(ops)


def _keys(prompt: int) -> list[bytes]:
    return [(prompt * _PROMPT_PAGES + page).to_bytes(16, "little") for page in range(_PROMPT_PAGES)]
