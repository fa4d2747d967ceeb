"""Engines over the golden checkpoints, and running requests on them from a test's thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from safetensors.numpy import save_file

from jkv.cache.control import TierStats
from jkv.cache.l1 import L1Pool
from jkv.cache.l3.objects import Objects, Operation
from jkv.cache.pages import Tier
from jkv.config import ServeConfig
from jkv.engine.build import build_from_checkpoint, use_compilation_cache
from jkv.engine.engine import Engine
from jkv.engine.request import CachedByTier, EngineRequest, FinishReason, Logprob, SamplingParams, TokenOutput
from jkv.models.config import ModelConfig
from jkv.models.forward import logits
from jkv.models.hf_config import from_hf
from jkv.models.hf_names import with_parameter_names
from jkv.models.params import abstract_params, tensor_names
from jkv.models.resolve import Checkpoint
from jkv.models.safetensors_source import SafetensorsSource
from tests.models.golden import TINY, config_json

R = TypeVar("R")

_ids = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All of a request's outputs, put together; `cached` are tokens from any tier."""

    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    cached: int
    by_tier: CachedByTier
    finish_reason: FinishReason
    error: str = ""

    @property
    def bits(self) -> tuple[tuple[int, ...], tuple[Logprob, ...]]:
        """What a hit must not change."""
        return self.tokens, self.logprobs


class Bench:
    """A running engine whose bookkeeping is checked after every step and every committed token."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.loop = engine._loop
        self.runner = self.loop._runner
        self.scheduler = self.loop.scheduler
        self.violations: list[AssertionError] = []
        self._check_after("schedule")
        self._check_after("commit")

    @property
    def page_size(self) -> int:
        return self.engine.info.page_size

    @property
    def total_pages(self) -> int:
        return self.engine.info.l1_pages

    def run(self, *requests: EngineRequest) -> list[Outcome]:
        """Runs requests at the same time."""

        async def gather() -> list[Outcome]:
            return await asyncio.gather(*(self.collect(r) for r in requests))

        return asyncio.run(gather())

    def one(self, request: EngineRequest) -> Outcome:
        return self.run(request)[0]

    def cold(self, request: EngineRequest) -> Outcome:
        """Runs the request alone and under a salt of its own."""
        outcome = self.one(with_salt(request, f"cold {next(_ids)}"))
        assert outcome.cached == 0
        return outcome

    async def collect(self, request: EngineRequest) -> Outcome:
        return put_together([output async for output in self.stream(request)])

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenOutput, None]:
        """The outputs as they come; closing it cancels the request."""
        outputs: asyncio.Queue[TokenOutput | None] = asyncio.Queue()

        def sink(output: TokenOutput) -> bool:
            outputs.put_nowait(output)
            return False

        running = asyncio.create_task(self.engine.generate(request, sink))
        running.add_done_callback(lambda _: outputs.put_nowait(None))
        try:
            while (output := await outputs.get()) is not None:
                yield output
            await running
        finally:
            running.cancel()

    def first_logits(self, request: EngineRequest) -> np.ndarray:
        """Runs a request for one token and returns the logits it was drawn from, `[vocab]`."""
        kept: list[jax.Array] = []
        sample = self.runner._sample

        def keep(hidden: jax.Array | None, rows: int, packed: np.ndarray) -> Any:
            assert hidden is not None
            kept.append(hidden[:1])
            return sample(hidden, rows, packed)

        self.runner._sample = keep
        self.one(dataclasses.replace(request, sampling=SamplingParams(max_tokens=1)))
        self.runner._sample = sample
        (hidden,) = kept
        plan = self.runner.plan
        abstract = abstract_params(plan.config, plan.dtype, stacked=False, panels=plan.panels).head_only()
        params = jax.tree.structure(abstract).unflatten(self.runner._head)
        return np.asarray(logits(plan.config, params, hidden, dense="xla"))[0]

    def matched_tokens(self, request: EngineRequest) -> int:
        """Tokens a hit saves when every full page of the prompt is cached."""
        length = len(request.prompt_ids)
        return min(length // self.page_size * self.page_size, length - 1)

    def settle(self) -> None:
        """Waits until nothing runs and no page is in use, then empties the cache."""
        wait_for(lambda: self.loop.alive == 0 and self.engine.stats.l1.in_use == 0)
        assert not self.violations
        if not self.scheduler.lower.off:
            self.flush(*self.scheduler.lower.tiers)
            assert self.scheduler.lower.host.held == 0
            assert self.scheduler.lower.pending_writes == 0
        self.scheduler.check()
        self._use(L1Pool(self.total_pages, self.page_size))

    @contextlib.contextmanager
    def shrunk(self, pages: int) -> Iterator[None]:
        """Lets the idle engine use only some pages of its pool: no program has to be compiled for it."""
        self.settle()
        whole = self.scheduler.pool
        self._use(L1Pool(pages, self.page_size))
        yield
        wait_for(lambda: self.loop.alive == 0 and self.engine.stats.l1.in_use == 0)
        self.scheduler.check()
        self._use(whole)

    @contextlib.contextmanager
    def disk_that_waits(self) -> Iterator[threading.Event]:
        """Has every write to L3 wait until the event is set."""
        disk = self.scheduler.lower.disk
        assert disk is not None
        store: Any = disk.store
        usual, go_on = store._pages, threading.Event()
        store._pages = _WaitingObjects(usual, go_on)
        try:
            yield go_on
        finally:
            go_on.set()
            self.ask(self.engine.cache.drain_writes())
            store._pages = usual

    @contextlib.contextmanager
    def limited(self, **limits: int) -> Iterator[None]:
        """Changes what the idle engine's steps may hold."""
        usual = self.scheduler.limits
        self.scheduler.limits = dataclasses.replace(usual, **limits)
        yield
        self.scheduler.limits = usual

    def flush(self, *tiers: Tier) -> Mapping[Tier, int]:
        return self.ask(self.engine.cache.flush(tiers))

    def stats(self, tier: Tier) -> TierStats:
        return self.ask(self.engine.cache.cache_stats()).tiers[tier]

    def ask(self, call: Coroutine[Any, Any, R]) -> R:
        """Waits for an answer of the engine's cache."""
        return asyncio.run(call)

    def stop(self) -> None:
        self.loop.stop()

    def _use(self, pool: L1Pool) -> None:
        pool.on_evict = self.scheduler.pool.on_evict
        self.scheduler.pool = self.scheduler.lower.pool = self.engine.cache._admin._pool = pool

    def _check_after(self, method: str) -> None:
        original = getattr(self.scheduler, method)

        def checked(*args: Any) -> Any:
            result = original(*args)
            try:
                self.scheduler.check()
            except AssertionError as error:
                self.violations.append(error)
            return result

        setattr(self.scheduler, method, checked)


class _WaitingObjects:
    """Objects of a store whose writes start when they may."""

    def __init__(self, inner: Objects, go_on: threading.Event) -> None:
        self._inner, self._go_on = inner, go_on
        self.read_page, self.delete = inner.read_page, inner.delete

    def write(self, name: str, data: bytes) -> Operation:
        self._go_on.wait()
        return self._inner.write(name, data)


def tiny_checkpoint(name: str, dialect: str = "config.json") -> Checkpoint:
    config = from_hf(config_json(name, dialect))
    source = with_parameter_names(SafetensorsSource(TINY / name), config.architecture)
    return Checkpoint(config=config, source=source)


def odd_checkpoint(directory: Path) -> Checkpoint:
    """Random weights in sizes that XLA:CPU's products treat differently for few and for many rows: long sums,
    cache rows wider than 512, head sizes that are no power of two.
    """
    odd = {"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": 72, "intermediate_size": 896}
    config = from_hf({**config_json("llama3"), **odd, "hidden_size": 128, "num_hidden_layers": 2})
    return random_checkpoint(config, directory)


def random_checkpoint(config: ModelConfig, directory: Path) -> Checkpoint:
    """Random weights, written to the directory."""
    rng = np.random.default_rng(0)
    tensors = {
        name: (rng.standard_normal(shape) * (0.1 if len(shape) > 1 else 1.0)).astype(np.float32)
        for name, shape in tensor_names(config, "float32").items()
    }
    save_file(tensors, str(directory / "model.safetensors"))
    return Checkpoint(config=config, source=SafetensorsSource(directory))


def build(checkpoint: Checkpoint, *, page_size: int, l1_tokens: int, **flags: Any) -> Bench:
    """An engine with few programs, so that tests compile little, and no tier below L1 unless asked for."""
    use_compilation_cache()
    small: dict[str, Any] = {"max_num_seqs": 4, "max_batched_tokens": 64, "max_mixed_tokens": 16, "l2_gib": 0}
    config = ServeConfig(page_size=page_size, l1_pages=l1_tokens // page_size, **{**small, **flags})
    return Bench(build_from_checkpoint(config, checkpoint, "model", lambda _: None))


def request(
    prompt: Iterable[int],
    max_tokens: int = 8,
    *,
    salt: str = "",
    no_cache: bool = False,
    priority: int = 0,
    deadline: float | None = None,
    **sampling: Any,
) -> EngineRequest:
    """Greedy with log-probabilities, past the end token, unless told otherwise."""
    defaults = {"temperature": 0.0, "ignore_eos": True, "logprobs": True}
    return EngineRequest(
        request_id=str(next(_ids)),
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **{**defaults, **sampling}),
        cache_salt=salt,
        no_cache=no_cache,
        priority=priority,
        deadline=deadline,
    )


def with_salt(request: EngineRequest, salt: str) -> EngineRequest:
    return dataclasses.replace(request, cache_salt=salt)


def random_prompt(seed: int, length: int) -> list[int]:
    """Token ids that every tiny model has."""
    return np.random.default_rng(seed).integers(3, 512, length).tolist()


def put_together(outputs: list[TokenOutput]) -> Outcome:
    last = outputs[-1]
    assert last.finish_reason is not None
    assert all(o.finish_reason is None for o in outputs[:-1])
    return Outcome(
        tokens=tuple(t for o in outputs for t in o.token_ids),
        logprobs=tuple(p for o in outputs for p in o.logprobs),
        cached=last.cached.total,
        by_tier=last.cached,
        finish_reason=last.finish_reason,
        error=last.error,
    )


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
