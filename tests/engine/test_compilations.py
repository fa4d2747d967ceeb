"""After warm-up nothing is traced or compiled, whatever comes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.engine.conftest import Tiny
from tests.engine.harness import random_prompt, request

_REQUESTS, _AT_ONCE = 500, 20


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """The compilation events (tracing, lowering, compiling) since the fixture was made."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def draw_sampling(rng: random.Random) -> dict[str, Any]:
    choices: dict[str, tuple[Any, ...]] = {
        "temperature": (0.0, 0.3, 1.0, 2.0),
        "top_p": (1.0, 0.9, 0.1),
        "top_k": (0, 1, 40),
        "min_p": (0.0, 0.05),
        "seed": (None, 0, 2**64 - 1),
        "repetition_penalty": (1.0, 1.3),
        "presence_penalty": (0.0, -1.0),
        "frequency_penalty": (0.0, 0.7),
        "logit_bias": ({}, {5: -100.0, 6: 10.0}),
        "logprobs": (False, True),
        "top_logprobs": (0, 20),
        "ignore_eos": (False, True),
    }
    return {name: rng.choice(values) for name, values in choices.items()}


def test_500_requests_compile_nothing(tiny: Tiny, compilations: list[str]) -> None:
    bench = tiny()
    jax.jit(lambda x: x + 1)(jnp.zeros(3))
    assert compilations, "the listener hears nothing"
    compilations.clear()
    rng = random.Random(0)
    requests = [
        request(
            random_prompt(rng.randrange(8), 256)[: rng.randrange(1, 257)],
            rng.randrange(1, 12),
            salt=rng.choice(("", "", "other")),
            no_cache=rng.random() < 0.1,
            **draw_sampling(rng),
        )
        for _ in range(_REQUESTS)
    ]
    outcomes = [o for i in range(0, _REQUESTS, _AT_ONCE) for o in bench.run(*requests[i : i + _AT_ONCE])]
    assert all(o.tokens for o in outcomes)
    assert sum(o.cached > 0 for o in outcomes) > _REQUESTS / 4
    assert compilations == []
