"""Sampling on the device against plain numpy in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jkv.engine.request import SamplingParams
from jkv.engine.sampling import (
    MAX_TOP_LOGPROBS,
    SampleBatch,
    Sampled,
    SamplerState,
    _adjust,
    _argmax,
    _filter,
    admit,
    sample,
)
from tests.engine.conftest import Tiny
from tests.engine.harness import random_prompt, request

VOCAB, SLOTS = 96, 8
_RNG = np.random.default_rng(7)
_sample, _admit = jax.jit(sample), jax.jit(admit)
_filter_jit, _adjust_jit, _argmax_jit = jax.jit(_filter), jax.jit(_adjust), jax.jit(_argmax)
# Chi-square's 99.99th percentile for 7 degrees of freedom.
_CHI_SQUARE_7 = 29.88


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, **fields)


def batch(
    rows: Sequence[SamplingParams],
    *,
    slots: Sequence[int] | None = None,
    position: int = 0,
) -> SampleBatch[jax.Array]:
    def floats(values: list[float]) -> jax.Array:
        return jnp.asarray(values, jnp.float32)

    return SampleBatch(
        slots=jnp.asarray(range(len(rows)) if slots is None else slots, jnp.int32),
        seeds=jnp.asarray([[p.seed or 0, 0] for p in rows], jnp.uint32),
        positions=jnp.full(len(rows), position, jnp.int32),
        temperature=floats([p.temperature for p in rows]),
        top_k=jnp.asarray([p.top_k or VOCAB for p in rows], jnp.int32),
        top_p=floats([p.top_p for p in rows]),
        min_p=floats([p.min_p for p in rows]),
        repetition=floats([p.repetition_penalty for p in rows]),
        presence=floats([p.presence_penalty for p in rows]),
        frequency=floats([p.frequency_penalty for p in rows]),
        adjusted=jnp.asarray(any(p.adjusts_logits for p in rows)),
        random=jnp.asarray(any(p.temperature > 0 for p in rows)),
        filtered=jnp.asarray(any(p.filters for p in rows)),
        logprobs=jnp.asarray(any(p.logprobs for p in rows)),
    )


def fresh_state() -> SamplerState[jax.Array]:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), SamplerState.abstract(SLOTS, VOCAB))


def draw(logits: np.ndarray, rows: Sequence[SamplingParams], **fields: Any) -> Sampled:
    sampled, _ = _sample(jnp.asarray(logits, jnp.float32), fresh_state(), batch(rows, **fields))
    return sampled


def random_logits(rows: int, scale: float = 3.0) -> np.ndarray:
    return (_RNG.standard_normal((rows, VOCAB)) * scale).astype(np.float32)


def kept_by_numpy(scaled: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Which tokens one row of temperature-scaled logits keeps: min_p, then top_k, then top_p, by sorting."""
    weights = np.exp(scaled.astype(np.float64) - scaled.max())
    kept = weights >= p.min_p
    order = np.argsort(-scaled, kind="stable")
    order = order[kept[order]][: p.top_k or VOCAB]
    share = np.cumsum(weights[order]) / weights[order].sum()
    count = int(np.searchsorted(share, p.top_p)) + 1 if p.top_p < 1 else len(order)
    result = np.zeros(VOCAB, bool)
    result[order[:count]] = True
    return result


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": VOCAB + 5},
        {"top_p": 0.0001},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_the_kept_set_is_exact(filters: dict[str, Any]) -> None:
    p = params(**filters)
    for scale in (0.3, 1.0, 3.0, 10.0):
        logits = random_logits(8, scale)
        kept = np.isfinite(np.asarray(_filter_jit(jnp.asarray(logits), batch([p] * 8))))
        np.testing.assert_array_equal(kept, [kept_by_numpy(row, p) for row in logits])


def test_equal_logits_are_kept_or_left_out_together() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [3, 40, 90]] = 2.0
    kept = np.isfinite(np.asarray(_filter_jit(jnp.asarray(logits), batch([params(top_k=2)]))))
    assert np.flatnonzero(kept[0]).tolist() == [3, 40, 90]


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}], ids=str)
def test_only_kept_tokens_are_drawn_and_all_of_them(filters: dict[str, Any]) -> None:
    logits = random_logits(1, scale=1.0)
    p = params(**filters, temperature=0.7)
    kept = kept_by_numpy(logits[0] / np.float32(0.7), p)
    rows = [params(**filters, temperature=0.7, seed=seed) for seed in range(3000)]
    drawn = np.unique(np.asarray(draw(np.repeat(logits, 3000, axis=0), rows, slots=[SLOTS] * 3000).tokens))
    np.testing.assert_array_equal(drawn, np.flatnonzero(kept))


def test_rows_with_filters_do_not_filter_their_neighbours() -> None:
    logits = np.zeros((4000, VOCAB), np.float32)
    rows = [params(top_k=1, seed=i) if i % 2 else params(seed=i) for i in range(4000)]
    tokens = np.asarray(draw(logits, rows, slots=[SLOTS] * 4000).tokens)
    assert len(np.unique(tokens[::2])) == VOCAB


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_the_distribution_is_softmax_at_its_temperature(temperature: float) -> None:
    rows = 8000
    logits = np.full(VOCAB, -1e9, np.float32)
    logits[:8] = np.linspace(-1, 1.5, 8)
    drawn = draw(
        np.tile(logits, (rows, 1)),
        [params(temperature=temperature, seed=seed) for seed in range(rows)],
        slots=[SLOTS] * rows,
    )
    counts = np.bincount(np.asarray(drawn.tokens), minlength=VOCAB)
    weights = np.exp(logits[:8].astype(np.float64) / temperature)
    expected = rows * weights / weights.sum()
    assert counts[8:].sum() == 0
    assert ((counts[:8] - expected) ** 2 / expected).sum() < _CHI_SQUARE_7


@settings(deadline=None)
@given(
    hnp.arrays(
        np.float32, (3, 70), elements=st.sampled_from([-np.inf, -2.5, -0.0, 0.0, 1.0, 3.0, np.inf, np.nan])
    )
)
def test_the_first_of_the_largest_is_taken(scores: np.ndarray) -> None:
    np.testing.assert_array_equal(_argmax_jit(scores), scores.argmax(axis=-1))


def test_positions_of_one_seed_draw_independently() -> None:
    logits = np.zeros((4, VOCAB), np.float32)
    rows = [params(seed=seed) for seed in range(4)]
    first, second = (np.asarray(draw(logits, rows, position=p).tokens) for p in (0, 1))
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first, np.asarray(draw(logits, rows, position=0).tokens))


def test_both_halves_of_a_seed_count() -> None:
    logits = jnp.zeros((2, VOCAB))
    halves = batch([params(), params()])
    halves = SampleBatch(**{**vars(halves), "seeds": jnp.asarray([[1, 0], [1, 1]], jnp.uint32)})
    tokens = np.asarray(_sample(logits, fresh_state(), halves)[0].tokens)
    assert tokens[0] != tokens[1]


def test_temperature_zero_is_greedy_beside_drawn_rows() -> None:
    logits = random_logits(8)
    rows = [params(temperature=0.0) if i % 2 else params(temperature=5.0, seed=i) for i in range(8)]
    tokens = np.asarray(draw(logits, rows).tokens)
    np.testing.assert_array_equal(tokens[1::2], logits.argmax(axis=-1)[1::2])
    assert (tokens[::2] != logits.argmax(axis=-1)[::2]).any()


def test_a_row_does_not_depend_on_its_neighbours_or_the_bucket() -> None:
    logits = random_logits(8)
    rows = [params(seed=i, temperature=1.0, top_p=0.9, min_p=0.01, top_k=30) for i in range(8)]
    together = np.asarray(draw(logits, rows).tokens)
    for count in (1, 2, 4):
        for first in range(0, 8, count):
            part = slice(first, first + count)
            tokens = draw(logits[part], rows[part]).tokens
            np.testing.assert_array_equal(np.asarray(tokens), together[part])
    np.testing.assert_array_equal(np.asarray(draw(logits[::-1], rows[::-1]).tokens), together[::-1])


def adjusted_by_numpy(
    logits: np.ndarray, p: SamplingParams, prompt: list[int], generated: list[int]
) -> np.ndarray:
    """vLLM's order and definitions: bias, repetition over prompt and output, frequency, presence."""
    adjusted = logits.astype(np.float64)
    for token, value in p.logit_bias.items():
        adjusted[token] += value
    for token in {*prompt, *generated}:
        adjusted[token] *= 1 / p.repetition_penalty if adjusted[token] > 0 else p.repetition_penalty
    for token in set(generated):
        adjusted[token] -= p.frequency_penalty * generated.count(token) + p.presence_penalty
    return adjusted


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 1.5},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 0.8},
        {"logit_bias": {3: 5.0, 50: -100.0}},
        {
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.3,
            "logit_bias": {3: 2.0, 10: 1.0},
        },
    ],
    ids=str,
)
def test_penalties_and_bias(fields: dict[str, Any]) -> None:
    p = params(temperature=0.0, **fields)
    prompt, generated = [3, 3, 10, 11], [10, 20, 20, 20, 50]
    state = _admit(
        fresh_state(),
        np.int32(5),
        np.bincount(generated, minlength=VOCAB).astype(np.int32),
        np.isin(np.arange(VOCAB), prompt),
        np.asarray([p.logit_bias.get(i, 0.0) for i in range(VOCAB)], np.float32),
    )
    for scale in (0.3, 1.0, 3.0):
        logits = random_logits(1, scale)
        expected = adjusted_by_numpy(logits[0], p, prompt, generated)
        got = np.asarray(_adjust_jit(jnp.asarray(logits), state, batch([p], slots=[5])))[0]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
        sampled, _ = _sample(jnp.asarray(logits), state, batch([p], slots=[5]))
        assert int(sampled.tokens[0]) == int(expected.argmax())


def test_sampled_tokens_count_from_the_next_step_on_and_only_in_their_slot() -> None:
    p = params(temperature=0.0, frequency_penalty=1.0)
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, 7], logits[:, 8] = 1.5, 1.0
    state, tokens = fresh_state(), []
    for _ in range(4):
        rows = batch([p, params(temperature=0.0)], slots=[2, 4])
        sampled, state = _sample(jnp.asarray(logits), state, rows)
        tokens.append(np.asarray(sampled.tokens).tolist())
    # 7 at 1.5, then 8 at 1.0 against 0.5, then 7 at 0.5, then 0 (the first of the zeros) at 0.0.
    assert [row[0] for row in tokens] == [7, 8, 7, 0]
    assert [row[1] for row in tokens] == [7] * 4
    assert np.asarray(state.last_tokens)[[2, 4]].tolist() == tokens[-1]


def test_padding_rows_leave_the_state_alone() -> None:
    rows = batch([params(temperature=0.0)] * 2, slots=[1, SLOTS])
    _, state = _sample(jnp.asarray(random_logits(2)), fresh_state(), rows)
    assert np.asarray(state.counts).sum() == 1
    assert np.count_nonzero(np.asarray(state.counts).sum(axis=1)) == 1


def test_logprobs_are_the_raw_distributions() -> None:
    logits = random_logits(4)
    p = params(temperature=0.3, top_k=2, seed=3, logit_bias={1: 5.0}, presence_penalty=1.0, logprobs=True)
    state = fresh_state()
    state = _admit(
        state,
        np.int32(0),
        np.ones(VOCAB, np.int32),
        np.ones(VOCAB, bool),
        np.full(VOCAB, 4.0, np.float32) * (np.arange(VOCAB) % 2),
    )
    sampled, _ = _sample(jnp.asarray(logits), state, batch([p] * 4))
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    chosen = np.take_along_axis(expected, np.asarray(sampled.tokens)[:, None], axis=-1)[:, 0]
    np.testing.assert_allclose(np.asarray(sampled.logprob), chosen, atol=1e-5)
    best = np.argsort(-expected, axis=-1)[:, :MAX_TOP_LOGPROBS]
    np.testing.assert_array_equal(np.asarray(sampled.top_ids), best)
    np.testing.assert_allclose(
        np.asarray(sampled.top_logprobs), np.take_along_axis(expected, best, axis=-1), atol=1e-5
    )


def test_a_seeded_request_is_the_same_alone_and_in_a_batch(tiny: Tiny) -> None:
    bench = tiny(batch_invariant=True)
    requests = [
        request(random_prompt(i, 10 + i), 16, temperature=1.5, top_p=0.95, seed=2**63 + i) for i in range(6)
    ]
    alone = [bench.one(r).bits for r in requests]
    assert [o.bits for o in bench.run(*requests[::-1])] == alone[::-1]
    other = request(requests[0].prompt_ids, 16, temperature=1.5, top_p=0.95, seed=5)
    assert bench.one(other).tokens != alone[0][0]


def test_requests_without_a_seed_differ(tiny: Tiny) -> None:
    bench = tiny()
    same = [request(random_prompt(1, 10), 16, temperature=1.5) for _ in range(4)]
    assert len({o.tokens for o in bench.run(*same)}) == 4


def test_a_resumed_request_draws_the_same_tokens(tiny: Tiny) -> None:
    bench = tiny(batch_invariant=True)
    requests = [
        request(random_prompt(i, 20), 40, temperature=1.2, seed=i, frequency_penalty=0.4, logit_bias={4: 1.0})
        for i in range(4)
    ]
    alone = [bench.one(r).bits for r in requests]
    with bench.shrunk(8):
        before = bench.engine.stats.preemptions
        assert [o.bits for o in bench.run(*requests)] == alone
        assert bench.engine.stats.preemptions > before


def test_a_slots_bias_and_penalties_end_with_their_request(tiny: Tiny) -> None:
    bench = tiny()
    plain = request(random_prompt(3, 12), 12)
    expected = bench.one(plain).tokens
    biased = [request(random_prompt(3, 12), 12, logit_bias={9: 100.0}) for _ in range(4)]
    assert {o.tokens for o in bench.run(*biased)} == {(9,) * 12}
    assert {o.tokens for o in bench.run(*[plain] * 4)} == {expected}
