"""Many mixed requests at once: no page is lost, and whoever finishes got its own tokens."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass
from typing import Any

from jkv.engine.request import EngineRequest, FinishReason, TokenOutput
from tests.engine.conftest import Tiny
from tests.engine.harness import Bench, random_prompt, request

_REQUESTS, _AT_ONCE = 2000, 48
_PAGES = 14
_SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 1, "logprobs": False},
    {"temperature": 0.8, "seed": 2, "top_p": 0.8, "presence_penalty": 0.6},
    {"repetition_penalty": 1.3, "logit_bias": {9: 3.0}, "top_logprobs": 2},
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A request and when its client goes away: after some seconds, after some outputs, or never."""

    request: EngineRequest
    identity: tuple[int, ...]  # equal for requests that must give equal tokens
    leave_after_s: float | None
    leave_after_outputs: int | None


def draw_plan(rng: random.Random) -> Plan:
    family, length, kind = rng.randrange(12), rng.choice((1, 15, 16, 17, 40, 64, 100)), rng.randrange(4)
    max_tokens = rng.choice((1, 5, 20, 40))
    deadline = time.monotonic() + rng.uniform(-0.01, 0.2) if rng.random() < 0.1 else None
    leaves = rng.random()
    return Plan(
        request=request(
            random_prompt(family, 128)[:length],
            max_tokens,
            salt=rng.choice(("", "", "tenant")),
            no_cache=rng.random() < 0.1,
            priority=rng.choice((0, 0, 1, -1)),
            deadline=deadline,
            **_SAMPLING[kind],
        ),
        identity=(family, length, kind),
        leave_after_s=rng.uniform(0, 0.1) if leaves < 0.15 else None,
        leave_after_outputs=rng.randrange(1, 4) if leaves > 0.8 else None,
    )


async def play(bench: Bench, plan: Plan) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []

    async def read() -> None:
        stream = bench.stream(plan.request)
        async with contextlib.aclosing(stream):
            async for output in stream:
                outputs.append(output)
                if len(outputs) == plan.leave_after_outputs:
                    return

    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(read(), plan.leave_after_s)
    return outputs


async def play_all(bench: Bench, plans: list[Plan]) -> list[list[TokenOutput]]:
    places = asyncio.Semaphore(_AT_ONCE)

    async def take_place(plan: Plan) -> list[TokenOutput]:
        async with places:
            return await play(bench, plan)

    return await asyncio.gather(*map(take_place, plans))


def test_every_page_comes_back(tiny: Tiny) -> None:
    bench = tiny(batch_invariant=True)
    rng = random.Random(0)
    plans = [draw_plan(rng) for _ in range(_REQUESTS)]
    before = bench.engine.stats
    with bench.shrunk(_PAGES):
        results = asyncio.run(play_all(bench, plans))
        after = bench.engine.stats
        counts = bench.scheduler.pool.counts()
        assert counts.in_use == 0
        assert counts.free + counts.cached == _PAGES
    assert not bench.violations
    assert after.preemptions > before.preemptions
    assert after.evictions > 0
    assert after.cached_tokens > before.cached_tokens
    check_tokens(plans, results)


def check_tokens(plans: list[Plan], results: list[list[TokenOutput]]) -> None:
    """Of requests that differ only in length, salt, cache and luck, one's tokens are another's first ones."""
    longest: dict[tuple[int, ...], tuple[int, ...]] = {}
    ends = dict.fromkeys((*FinishReason, None), 0)
    for plan, outputs in zip(plans, results, strict=True):
        tokens = tuple(t for o in outputs for t in o.token_ids)
        reason = outputs[-1].finish_reason if outputs else None
        ends[reason] += 1
        known = longest.setdefault(plan.identity, tokens)
        assert known[: len(tokens)] == tokens[: len(known)]
        longest[plan.identity] = max(known, tokens, key=len)
        if reason is FinishReason.LENGTH:
            assert len(tokens) == plan.request.sampling.max_tokens
    assert ends[FinishReason.ERROR] == 0
    assert ends[FinishReason.LENGTH] > len(plans) / 3
    assert ends[FinishReason.CANCELLED] > 0, "no deadline passed"
    assert ends[None] > 0, "no client went away"
