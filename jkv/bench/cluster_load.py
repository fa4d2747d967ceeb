"""Requests for a simulated cluster: groups with long shared starts, or a recorded trace."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from jkv.bench.cluster_engine import Job
from jkv.bench.trace_file import BLOCK_TOKENS, read_trace
from jkv.cache.keys import KEY_BYTES
from jkv.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Request:
    """`at` is its arrival at a rate of one request a second."""

    at: float
    tokens: int
    keys: tuple[bytes, ...]
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests in order of arrival, and what an infinite cache shared by all engines would serve of them."""

    requests: Sequence[Request]
    page_size: int
    capacity_pages: int  # of one engine

    @property
    def prompt_tokens(self) -> int:
        return sum(request.tokens for request in self.requests)

    @property
    def ideal_hit_tokens(self) -> int:
        seen: set[bytes] = set()
        hits = 0
        for request in self.requests:
            matched = next((i for i, key in enumerate(request.keys) if key not in seen), len(request.keys))
            hits += min(matched * self.page_size, request.tokens - 1)
            seen.update(request.keys)
        return hits

    def jobs(self, rate: float) -> Iterator[Job]:
        """The requests at `rate` a second."""
        for request in self.requests:
            yield Job(
                arrival=request.at / rate,
                tokens=request.tokens,
                keys=request.keys,
                output_tokens=request.output_tokens,
            )


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Each request belongs to one of `groups`, drawn evenly; each engine can hold a third of the groups."""

    groups: int = 24
    shared_tokens: int = 6000
    own_tokens: int = 1200
    output_tokens: int = 64
    page_size: int = 64


def group_load(shape: Groups, requests: int, seed: int) -> Load:
    """Arrivals are a Poisson process."""
    chance = random.Random(seed)
    shared = shape.shared_tokens // shape.page_size
    pages = (shape.shared_tokens + shape.own_tokens) // shape.page_size
    made = []
    at = 0.0
    for number in range(requests):
        group = chance.randrange(shape.groups)
        starts = [_key("group", group, page) for page in range(shared)]
        made.append(
            Request(
                at=at,
                tokens=shape.shared_tokens + shape.own_tokens,
                keys=(*starts, *(_key("own", number, page) for page in range(shared, pages))),
                output_tokens=shape.output_tokens,
            )
        )
        at += chance.expovariate(1.0)
    return Load(requests=made, page_size=shape.page_size, capacity_pages=-(-shape.groups // 3) * pages)


def trace_load(path: Path, requests: int, engines: int) -> Load:
    """The first requests of a trace in Mooncake's format, at its own intervals; each engine can hold its part
    of all its blocks, so that together they hold each block once.

    Raises:
        ConfigError: a file that cannot be read, or a line without a time.
    """
    recorded = read_trace(path)[:requests]
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        entries = [json.loads(line) for line in lines[: len(recorded)]]
        times = [float(entry["timestamp"]) / 1000 for entry in entries]
        outputs = [max(int(entry["output_length"]), 1) for entry in entries]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"--file {path}: a line has no usable timestamp or output_length: {error}"
        ) from error
    blocks = {block for request in recorded for block in request.full_ids}
    scale = (len(recorded) - 1) / max(times[-1] - times[0], 1e-9)
    return Load(
        requests=[
            Request(
                at=(time - times[0]) * scale,
                tokens=request.input_length,
                keys=tuple(_key("block", block, 0) for block in request.full_ids),
                output_tokens=output,
            )
            for request, time, output in zip(recorded, times, outputs, strict=True)
        ],
        page_size=BLOCK_TOKENS,
        capacity_pages=-(-len(blocks) // engines),
    )


def _key(kind: str, number: int, page: int) -> bytes:
    return blake2b(f"{kind} {number} {page}".encode(), digest_size=KEY_BYTES).digest()
