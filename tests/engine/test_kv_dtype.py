from __future__ import annotations

from tests.engine.conftest import Tiny
from tests.engine.harness import random_prompt, request


def test_bfloat16_kv_rounds_a_little_and_a_hit_reads_what_the_cold_run_read(tiny: Tiny) -> None:
    exact, rounded = (tiny(batch_invariant=True, **flags) for flags in ({}, {"kv_dtype": "bfloat16"}))
    r = request(random_prompt(1, 5 * exact.page_size + 3), 1, top_logprobs=3)
    cold = rounded.cold(r)
    rounded.one(r)
    hit = rounded.one(r)
    assert hit.cached == 5 * rounded.page_size
    assert hit.bits == cold.bits
    difference = abs(cold.logprobs[0].logprob - exact.cold(r).logprobs[0].logprob)
    assert 0 < difference < 0.05
