"""Traces in the shape of Mooncake's conversations, made up."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

BLOCK = 512


def make_trace(path: Path, *, requests: int, seed: int = 0) -> Path:
    """Conversations that go on with histories of theirs, recent ones more often, behind one system block."""
    rng, fresh = random.Random(seed), itertools.count(1)
    histories: list[tuple[int, ...]] = []
    lines = []
    for number in range(requests):
        goes_on = bool(histories) and rng.random() < 0.6
        before = histories[-min(len(histories), round(rng.paretovariate(0.7)))] if goes_on else (0,)
        full = (*before, *itertools.islice(fresh, rng.randint(0, 9)))
        histories.append(full)
        tail = rng.randrange(BLOCK)
        ids = [*full, next(fresh)] if tail else list(full)
        lines.append(
            {
                "timestamp": 3000 * number,
                "input_length": len(full) * BLOCK + tail,
                "output_length": rng.randint(1, 900),
                "hash_ids": ids,
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
