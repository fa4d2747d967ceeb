"""A tiny server with a disk tier, what tests ask of it, and what they do to its files."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.cache.keys import page_key
from jkv.cache.l3.format import HEADER_BYTES, MAGIC
from jkv.cache.l3.names import StoredPage, parse
from tests.e2e.calls import collect, greedy, ids
from tests.e2e.server import TINY, Server, serving, wait_for

T = TypeVar("T")

PAGE = 8
PAGE_BYTES = 3 * PAGE * 2 * 2 * 16 * 4  # layers, tokens, K and V, heads, head size, float32
OBJECT_BYTES = HEADER_BYTES + PAGE_BYTES
WAIT_S = 120.0  # for what takes a moment, on a machine that does much else
NEW_TOKENS = 4

# One set of programs for all of this package's servers: the compile cache makes each later start short.
_PROGRAMS = "--max-num-seqs 4 --max-batched-tokens 64 --max-mixed-tokens 16 --max-model-len 256"
_FLAGS = f"--model {TINY} --page-size {PAGE} {_PROGRAMS} --batch-invariant --l1-pages 64"


@dataclass(frozen=True)
class Answer:
    """What a request got. `tiers` are the prompt tokens that each tier served, of those that did."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    tiers: dict[str, int]

    @property
    def bits(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """What nothing may change."""
        return self.tokens, self.logprobs


class Faults:
    """The fault plan of a running server's page store."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "faults.json"
        self.clear()

    def set(self, **plan: float) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(plan))
        new.replace(self.path)

    def clear(self) -> None:
        self.set()

    @contextmanager
    def of(self, **plan: float) -> Iterator[None]:
        self.set(**plan)
        try:
            yield
        finally:
            self.clear()


class Tiered:
    """A server with its store in `store`. Answers that are no success fail the test."""

    def __init__(self, server: Server, store: Path, faults: Faults) -> None:
        self.server, self.store, self.faults = server, store, faults
        self._cache: Any = pb_grpc.CacheStub(server.channel)

    def ask(self, prompt: Sequence[int], *, max_tokens: int = NEW_TOKENS, no_cache: bool = False) -> Answer:
        call = self.server.stub.Generate(request(prompt, max_tokens, no_cache=no_cache), timeout=WAIT_S)
        generation = collect(call)
        choice, usage = generation.choices[0], generation.usages[0]
        assert choice.finish_reason == "length"
        assert len(choice.token_ids) == max_tokens
        cached = usage.cached_by_tier
        tiers = {tier: getattr(cached, tier) for tier in ("l1", "l2", "l3") if getattr(cached, tier)}
        return Answer(tuple(choice.token_ids), tuple(one["logprob"] for one in choice.logprobs), tiers)

    def cold(self, prompt: Sequence[int], max_tokens: int = NEW_TOKENS) -> Answer:
        """The answer that the cache has no part in."""
        answer = self.ask(prompt, max_tokens=max_tokens, no_cache=True)
        assert answer.tiers == {}
        return answer

    def lookup(self, prompt: Sequence[int]) -> dict[str, int]:
        request = pb.LookupRequest(prefix=pb.Prefix(token_ids=ids(prompt)))
        found = self._cache.Lookup(request, timeout=WAIT_S).cached_by_tier
        return {tier: getattr(found, tier) for tier in ("l1", "l2", "l3") if getattr(found, tier)}

    def evict(self, prompt: Sequence[int]) -> int:
        request = pb.EvictRequest(prefix=pb.Prefix(token_ids=ids(prompt)))
        return self._cache.Evict(request, timeout=WAIT_S).pages

    def pin(self, prompt: Sequence[int]) -> int:
        request = pb.PinRequest(prefix=pb.Prefix(token_ids=ids(prompt)))
        return self._cache.Pin(request, timeout=WAIT_S).pages

    def drain(self) -> None:
        self._cache.Drain(pb.DrainRequest(), timeout=WAIT_S)

    def flush(self, *tiers: str) -> None:
        self._cache.Flush(pb.FlushRequest(tiers=tiers), timeout=WAIT_S)

    def leave_to_disk(self) -> None:
        """Waits until the disk has all that it gets, then takes it from the tiers above."""
        self.drain()
        self.flush("l1", "l2")

    def store_prompt(self, prompt: Sequence[int]) -> Answer:
        """Has a prompt computed and leaves it in L3 alone; returns its answer."""
        answer = self.ask(prompt)
        self.leave_to_disk()
        assert self.lookup(prompt) == {"l3": whole_pages(prompt)}
        return answer

    def stats(self) -> pb.CacheStatsResponse:
        return self._cache.Stats(pb.CacheStatsRequest(), timeout=WAIT_S)

    def tier(self, name: str) -> Any:
        return next(tier for tier in self.stats().tiers if tier.tier == name)

    @property
    def l3(self) -> Any:
        return self.tier("l3")

    def errors(self) -> dict[str, int]:
        return dict(self.l3.errors_by_reason)

    @contextmanager
    def counting(self, *reasons: str) -> Iterator[None]:
        """Asserts that the errors met meanwhile are these, and that each was met."""
        before = self.errors()
        yield
        after = self.errors()
        grown = {reason for reason, count in after.items() if count > before.get(reason, 0)}
        assert grown == set(reasons), f"{grown} were counted, not {set(reasons)}"

    def serves_from_disk(self, prompt: Sequence[int], expected: Answer) -> None:
        """All of a prompt comes from L3, with the right answer, once a breaker that is open has closed."""

        def look() -> bool:
            self.leave_to_disk()
            answer = self.ask(prompt)
            assert answer.bits == expected.bits
            return answer.tiers == {"l3": whole_pages(prompt)}

        wait_for(look, "all of the prompt comes from the disk again", WAIT_S)
        assert self.l3.breaker == "closed"

    def is_in_service_again(self, new_prompt: Callable[[int], Sequence[int]]) -> None:
        """Both breakers close: a write has to tell that the disk takes pages, a read that it gives them."""

        def look() -> bool:
            prompt = new_prompt(1)
            self.ask(prompt)
            self.leave_to_disk()
            self.ask(prompt)
            return self.l3.breaker == "closed"

        wait_for(look, "the disk is written to and read again", WAIT_S)

    def is_idle_and_empty(self) -> None:
        """Nothing is in use, held or waiting to be written once nobody asks for anything."""
        self.drain()

        def unused() -> bool:
            before = self.server.idle_lines()
            self.stats()  # wakes the engine, which then tells that it is idle, if it is
            return self.server.wait_idle(before, WAIT_S)[0] == 0

        wait_for(unused, "no page of L1 is in use", WAIT_S)
        self.flush("l1", "l2")
        stats = self.stats()
        assert stats.pending_writes == 0
        assert {tier.tier: tier.pages for tier in stats.tiers if tier.tier != "l3"} == {"l1": 0, "l2": 0}

    def pages(self, prompt: Sequence[int]) -> list[Path]:
        """The files of a prompt's pages in order, up to the first that is missing."""
        return [self.store / page.name for page in published(self.store, prompt)]


def request(prompt: Sequence[int], max_tokens: int, *, no_cache: bool = False) -> pb.GenerateRequest:
    sampling = greedy(max_tokens, ignore_eos=True, logprobs=True)
    return pb.GenerateRequest(token_ids=ids(prompt), sampling=sampling, no_cache=no_cache)


def whole_pages(prompt: Sequence[int]) -> int:
    """Tokens that a hit of every full page saves."""
    return min(len(prompt) // PAGE * PAGE, len(prompt) - 1)


def prompts(seed: int) -> Callable[[int], list[int]]:
    """Makes prompts of so many pages and a bit, no two of which share one."""
    chance = np.random.default_rng(seed)
    return lambda pages: chance.integers(3, 512, pages * PAGE + 3).tolist()


def stored(store: Path) -> dict[bytes, StoredPage]:
    """What the names in a directory tell, without the server."""
    names = (str(path.relative_to(store)) for path in store.rglob("*") if path.is_file())
    found = (parse(name) for name in names)
    return {page.key: page for page in found if page is not None}


def published(store: Path, prompt: Sequence[int]) -> list[StoredPage]:
    """The pages that a directory has of a prompt, in order, up to the first that is missing."""
    found = stored(store)
    first = prompt[:PAGE]
    chain = [page for page in found.values() if page.key == page_key(page.parent, first)]
    while chain and (start := len(chain) * PAGE) + PAGE <= len(prompt):
        page = found.get(page_key(chain[-1].key, prompt[start : start + PAGE]))
        if page is None:
            break
        chain.append(page)
    return chain


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def set_version(file: Path, version: int) -> None:
    """Makes a page one of another format version; its checksums are not reached."""
    data = bytearray(file.read_bytes())
    struct.pack_into("<I", data, len(MAGIC), version)
    file.write_bytes(data)


def in_parallel(work: Callable[[T], object], items: Iterable[T], workers: int) -> None:
    """Runs `work` for every item; raises the first error."""
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(work, items):
            pass


@contextmanager
def sampled(look: Callable[[], None]) -> Iterator[None]:
    """Calls `look` again and again meanwhile, and raises what it raises."""
    ended, errors = threading.Event(), []

    def run() -> None:
        try:
            while not ended.wait(0.01):
                look()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if errors:
        raise errors[0]


@contextmanager
def tiered(directory: Path, *flags: str, store: Path | None = None) -> Iterator[Tiered]:
    """A server on a store, ready, and killed afterwards unless it has ended. Later flags win."""
    store = store or directory / "l3"
    faults = Faults(directory)
    usual = f"{_FLAGS} --l2-gib 16MiB --l3-dir {store} --l3-gib 64MiB --load-policy always".split()
    with serving(directory, *usual, *flags, JKV_TEST_L3_FAULTS=str(faults.path)) as server:
        yield Tiered(server, store, faults)


def stop(subject: Tiered) -> None:
    """SIGTERM, and a clean end."""
    subject.server.terminate()
    assert subject.server.process.wait(WAIT_S) == 0
