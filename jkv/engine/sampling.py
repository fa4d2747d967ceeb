"""Drawing the next tokens on the device.

A row's result depends on its own logits, parameters, seed and position alone, never on its neighbours: noise
comes from a counter-based generator keyed by (seed, position), and the filters are thresholds within a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jkv.kernels.batch import ArrayT

# What OpenAI's API allows at most.
MAX_TOP_LOGPROBS = 20
# Below this a temperature divides into infinities; vLLM clamps at the same value.
_MIN_TEMPERATURE = 1e-2


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplerState(Generic[ArrayT]):
    """What sampling remembers of each slot between steps; donated to every call. Owner: the engine's
    thread.
    """

    last_tokens: ArrayT  # [slots] int32, the newest token
    counts: ArrayT  # [slots, vocab] int32, how often each token was generated
    in_prompt: ArrayT  # [slots, vocab] bool
    bias: ArrayT  # [slots, vocab] float32

    @staticmethod
    def abstract(slots: int, vocab: int) -> SamplerState[jax.ShapeDtypeStruct]:
        """Shapes and dtypes only."""

        def struct(dtype: DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype)

        return SamplerState(
            last_tokens=struct(jnp.int32, slots),
            counts=struct(jnp.int32, slots, vocab),
            in_prompt=struct(jnp.bool_, slots, vocab),
            bias=struct(jnp.float32, slots, vocab),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SampleBatch(Generic[ArrayT]):
    """Parameters of the rows to sample, `[S]` each unless stated; rows past the last are padding."""

    slots: ArrayT  # int32; the slot count marks padding
    seeds: ArrayT  # [S, 2] uint32, low and high half
    positions: ArrayT  # int32, how many tokens the sequence has generated before
    temperature: ArrayT  # float32, 0 is greedy
    top_k: ArrayT  # int32, the vocabulary size is off
    top_p: ArrayT  # float32
    min_p: ArrayT  # float32
    repetition: ArrayT  # float32
    presence: ArrayT  # float32
    frequency: ArrayT  # float32
    adjusted: ArrayT  # bool scalar: some row has penalties or a bias
    random: ArrayT  # bool scalar: some row is not greedy
    filtered: ArrayT  # bool scalar: some row has top_k, top_p or min_p
    logprobs: ArrayT  # bool scalar: some row wants log-probabilities

    @staticmethod
    def abstract(rows: int) -> SampleBatch[jax.ShapeDtypeStruct]:
        """Shapes and dtypes only."""

        def struct(dtype: DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype)

        ints, floats, flag = struct(jnp.int32, rows), struct(jnp.float32, rows), struct(jnp.bool_)
        return SampleBatch(
            slots=ints,
            seeds=struct(jnp.uint32, rows, 2),
            positions=ints,
            temperature=floats,
            top_k=ints,
            top_p=floats,
            min_p=floats,
            repetition=floats,
            presence=floats,
            frequency=floats,
            adjusted=flag,
            random=flag,
            filtered=flag,
            logprobs=flag,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What a step drew. The log-probability fields are zero unless `SampleBatch.logprobs`.

    They are those of the model's own distribution, before bias, penalties, temperature and filters, as
    vLLM's are.
    """

    tokens: jax.Array  # [S] int32
    logprob: jax.Array  # [S] float32
    top_ids: jax.Array  # [S, MAX_TOP_LOGPROBS] int32, best first
    top_logprobs: jax.Array  # [S, MAX_TOP_LOGPROBS] float32


def sample(
    logits: jax.Array, state: SamplerState[jax.Array], batch: SampleBatch[jax.Array]
) -> tuple[Sampled, SamplerState[jax.Array]]:
    """Draws one token per row from float32 `[S, vocab]` logits and records it in the state."""
    adjusted = lax.cond(batch.adjusted, lambda: _adjust(logits, state, batch), lambda: logits)
    greedy = _argmax(adjusted)
    drawn = lax.cond(batch.random, lambda: _draw(adjusted, batch), lambda: greedy)
    tokens = jnp.where(batch.temperature == 0, greedy, drawn)
    logprob, top_ids, top_logprobs = lax.cond(
        batch.logprobs, lambda: _logprobs(logits, tokens), lambda: _no_logprobs(logits.shape[0])
    )
    state = SamplerState(
        last_tokens=state.last_tokens.at[batch.slots].set(tokens, mode="drop"),
        counts=state.counts.at[batch.slots, tokens].add(1, mode="drop"),
        in_prompt=state.in_prompt,
        bias=state.bias,
    )
    return Sampled(tokens=tokens, logprob=logprob, top_ids=top_ids, top_logprobs=top_logprobs), state


def admit(
    state: SamplerState[jax.Array], slot: jax.Array, counts: jax.Array, in_prompt: jax.Array, bias: jax.Array
) -> SamplerState[jax.Array]:
    """Sets a slot's history and bias (`[vocab]` each) when a sequence takes it."""
    return SamplerState(
        last_tokens=state.last_tokens,
        counts=state.counts.at[slot].set(counts),
        in_prompt=state.in_prompt.at[slot].set(in_prompt),
        bias=state.bias.at[slot].set(bias),
    )


def _adjust(logits: jax.Array, state: SamplerState[jax.Array], batch: SampleBatch[jax.Array]) -> jax.Array:
    """Bias, then the repetition penalty (arXiv:1909.05858), then OpenAI's frequency and presence
    penalties.
    """
    slots = jnp.minimum(batch.slots, state.counts.shape[0] - 1)
    counts, in_prompt = state.counts[slots], state.in_prompt[slots]
    logits = logits + state.bias[slots]
    repetition = jnp.where((counts > 0) | in_prompt, batch.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    return logits - batch.frequency[:, None] * counts - batch.presence[:, None] * (counts > 0)


def _draw(logits: jax.Array, batch: SampleBatch[jax.Array]) -> jax.Array:
    """Samples by adding Gumbel noise (the Gumbel-max trick); greedy rows are computed and discarded."""
    scaled = logits / jnp.maximum(batch.temperature, _MIN_TEMPERATURE)[:, None]
    kept = lax.cond(batch.filtered, lambda: _filter(scaled, batch), lambda: scaled)

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (logits.shape[1],), jnp.float32)

    return _argmax(kept + jax.vmap(noise)(batch.seeds, batch.positions))


def _argmax(scores: jax.Array) -> jax.Array:
    """As `jnp.argmax` over the last axis, int32: the first of the largest, or the first NaN.

    XLA:CPU vectorizes these two reductions, but not that of pairs: 0.2 ms and not 1.8 for `[8, 49152]`.
    """
    best = scores.max(axis=-1, keepdims=True)
    places = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    return jnp.where((scores == best) | jnp.isnan(scores), places, scores.shape[-1]).min(axis=-1)


def _filter(scaled: jax.Array, batch: SampleBatch[jax.Array]) -> jax.Array:
    """Masks what min_p, top_k and then top_p leave out, without sorting: each is a threshold found by
    bisection.
    """
    order = _ordered_bits(scaled)
    weights = jnp.exp(scaled - scaled.max(axis=-1, keepdims=True))
    keep = weights >= batch.min_p[:, None]
    keep &= order >= _threshold(order, keep.astype(jnp.float32), batch.top_k.astype(jnp.float32))[:, None]
    weights = jnp.where(keep, weights, 0)
    # At most a whole row's weight: rounding must not ask for more than there is.
    wanted = jnp.minimum(batch.top_p, 1.0) * weights.sum(axis=-1)
    off = batch.top_p >= 1.0
    keep &= (order >= _threshold(order, weights, wanted)[:, None]) | off[:, None]
    return jnp.where(keep, scaled, -jnp.inf)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """uint32 that sort as the floats do."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(order: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest t with `sum(weights[order >= t]) >= wanted`, per row; 0 where no t reaches it."""

    def body(i: jax.Array, low: jax.Array) -> jax.Array:
        candidate = low | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        mass = jnp.where(order >= candidate[:, None], weights, 0).sum(axis=-1)
        return jnp.where(mass >= wanted, candidate, low)

    return lax.fori_loop(0, 32, body, jnp.zeros(order.shape[0], jnp.uint32))


def _logprobs(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - normalizer
    values, ids = lax.top_k(logits, min(MAX_TOP_LOGPROBS, logits.shape[1]))
    pad = ((0, 0), (0, MAX_TOP_LOGPROBS - values.shape[1]))
    return chosen, jnp.pad(ids.astype(jnp.int32), pad), jnp.pad(values - normalizer[:, None], pad)


def _no_logprobs(rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    wide = (rows, MAX_TOP_LOGPROBS)
    return jnp.zeros(rows), jnp.zeros(wide, jnp.int32), jnp.zeros(wide)
