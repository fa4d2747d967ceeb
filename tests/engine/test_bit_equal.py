"""In batch-invariant mode a request gets the same bits as alone and cold, whatever it hits, whatever it is
batched with, and however often it is stopped.
"""

from __future__ import annotations

from typing import Any

import pytest

from jkv.engine.request import EngineRequest
from tests.engine.conftest import Tiny
from tests.engine.harness import Bench, Outcome, random_prompt, request

pytestmark = pytest.mark.parametrize(
    ("name", "page_size"),
    [
        ("llama3", 16),
        ("llama3", 64),
        ("llama_mha_tied", 8),
        ("llama_mha_tied", 16),
        ("mistral_window", 8),
        ("mistral_window", 64),
        ("odd", 16),
        pytest.param("qwen3_moe", 16, marks=pytest.mark.full),
        pytest.param("qwen3_moe", 64, marks=pytest.mark.full),
        pytest.param("gemma2", 8, marks=pytest.mark.full),
        pytest.param("gemma3", 64, marks=pytest.mark.full),
    ],
)


@pytest.fixture
def bench(tiny: Tiny, name: str, page_size: int) -> Bench:
    return tiny(name, page_size, batch_invariant=True)


def varied(number: int, prompt: list[int], max_tokens: int = 12) -> EngineRequest:
    """Greedy, drawn and penalized requests by turns; all bring a seed, so that a rerun draws the same."""
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": {7: 2.0}},
    )
    return request(prompt, max_tokens, seed=number, top_logprobs=3, **kinds[number % len(kinds)])


def cold_bits(bench: Bench, requests: list[EngineRequest]) -> list[object]:
    return [bench.cold(r).bits for r in requests]


def bits(outcomes: list[Outcome]) -> list[object]:
    return [o.bits for o in outcomes]


def test_a_hit_at_every_page_boundary(bench: Bench) -> None:
    page = bench.page_size
    for length in (page - 1, page, page + 1, 2 * page - 1, 2 * page, 2 * page + 1, 4 * page, 4 * page + 3):
        for kind in range(3):
            r = varied(kind, random_prompt(length, length))
            cold = bench.cold(r)
            bench.one(r)
            hit = bench.one(r)
            assert hit.cached == bench.matched_tokens(r)
            assert hit.bits == cold.bits, f"length {length}"


def test_a_whole_prompt_cached_five_times_over(bench: Bench) -> None:
    r = varied(0, random_prompt(1, 3 * bench.page_size))
    cold = bench.cold(r)
    assert bench.one(r).cached == 0
    for _ in range(5):
        hit = bench.one(r)
        assert hit.cached == 3 * bench.page_size - 1
        assert hit.bits == cold.bits


def test_the_next_turn_of_a_chat_hits_what_decoding_filled(bench: Bench) -> None:
    page = bench.page_size
    first = varied(0, random_prompt(2, page + 2), 2 * page)
    answer = bench.one(first).tokens
    second = varied(1, [*first.prompt_ids, *answer, *random_prompt(3, 5)])
    hit = bench.one(second)
    # The last sampled token is never computed, and its page is not full here.
    assert hit.cached == 3 * page
    assert hit.bits == bench.cold(second).bits


def test_hits_and_misses_in_one_batch(bench: Bench) -> None:
    page = bench.page_size
    requests = [varied(i, random_prompt(10 + i, (i % 4) * page + 1 + i)) for i in range(12)]
    expected = cold_bits(bench, requests)
    bench.run(*requests[::2])
    outcomes = bench.run(*requests)
    assert bits(outcomes) == expected
    for i, outcome in enumerate(outcomes):
        assert outcome.cached == (bench.matched_tokens(requests[i]) if i % 2 == 0 else 0)


def test_the_same_prompt_32_times_at_once(bench: Bench) -> None:
    requests = [varied(i % 3, random_prompt(4, 2 * bench.page_size + 3), 6) for i in range(32)]
    expected = cold_bits(bench, requests[:3])
    outcomes = bench.run(*requests)
    assert bits(outcomes) == [expected[i % 3] for i in range(32)]
    # Those of the first step may compute the prompt side by side; all who come later find it.
    assert sum(o.cached == 2 * bench.page_size for o in outcomes) >= 28


def test_an_eviction_storm_beside_one_long_stream(bench: Bench) -> None:
    page = bench.page_size
    stream = varied(0, random_prompt(5, 5), 4 * page)
    storm = [varied(i, random_prompt(100 + i % 9, page + 2 + i % 3), 4) for i in range(24)]
    expected = cold_bits(bench, [stream, *storm])
    with bench.shrunk(9):
        before = bench.scheduler.pool.evictions
        assert bits(bench.run(stream, *storm)) == expected
        assert bench.scheduler.pool.evictions > before + 9


def test_preemption(bench: Bench) -> None:
    page = bench.page_size
    requests = [varied(i, random_prompt(200 + i, page + i), 2 * page + 4) for i in range(6)]
    expected = cold_bits(bench, requests)
    with bench.shrunk(7):
        before = bench.engine.stats.preemptions
        assert bits(bench.run(*requests)) == expected
        assert bench.engine.stats.preemptions > before


@pytest.mark.parametrize(("batched", "mixed"), [(16, 4), (16, 16), (5, 3), (64, 64)])
def test_chunks_of_any_size(bench: Bench, batched: int, mixed: int) -> None:
    page = bench.page_size
    requests = [varied(i, random_prompt(300 + i, 2 * page + 13 * i)) for i in range(5)]
    expected = cold_bits(bench, requests)
    with bench.limited(max_batched_tokens=batched, max_mixed_tokens=mixed):
        assert bits(bench.run(*requests)) == expected
        assert bits(bench.run(*requests)) == expected
