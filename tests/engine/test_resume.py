"""An answer begun elsewhere goes on as if it had never been interrupted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.engine.conftest import Tiny
from tests.engine.harness import random_prompt, request

PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 23])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.1, "seed": 5, "top_p": 0.9}, PENALTIES],
    ids=["greedy", "seeded", "penalties"],
)
def test_tokens_after_a_resumption_are_those_of_the_whole(
    tiny: Tiny, sampling: dict[str, Any], cut: int
) -> None:
    bench = tiny(batch_invariant=True)
    whole = request(random_prompt(3, 37), 24, **sampling)
    expected = bench.cold(whole)
    resumed = dataclasses.replace(whole, resumed=expected.tokens[:cut], cache_salt="resumed")
    rest = bench.one(resumed)
    assert rest.tokens == expected.tokens[cut:]
    assert rest.logprobs == expected.logprobs[cut:]
    again = bench.one(dataclasses.replace(resumed, request_id="again"))
    assert again.bits == rest.bits
    assert again.cached == min(37, (37 + cut) // 16 * 16), "of the prompt's tokens, whatever more was cached"
