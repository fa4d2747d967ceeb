"""The mixture of experts against float64, however tokens fall to experts and whatever lies in the padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jkv.kernels.gpu_grouped_tiles import GroupedTiles
from jkv.kernels.xla_attention import BATCH_INVARIANT_CPU_OPTIONS, CPU_OPTIONS
from jkv.models.config import ExpertsConfig, ModelConfig
from jkv.models.experts import BATCH_INVARIANT_BLOCK, ExpertProduct, SparseMLP, block_rows
from jkv.models.hf_config import from_hf
from tests.models.golden import config_json

_TILES = GroupedTiles(rows=16, columns=32, depth=32, warps=4, stages=1, interpret=True)
_WAYS = pytest.mark.parametrize("product", [4, None, _TILES], ids=["loop", "ragged", "kernel"])


def config_of(experts: ExpertsConfig) -> ModelConfig:
    return replace(from_hf(config_json("qwen3_moe")), experts=experts)


QWEN = config_of(ExpertsConfig(count=8, per_token=3, normalized=False))
MIXTRAL = config_of(ExpertsConfig(count=8, per_token=2, normalized=True))
MANY = config_of(ExpertsConfig(count=64, per_token=4, normalized=True))
# Sums that XLA:CPU treats differently for few and for many rows.
LONG_SUMS = replace(QWEN, hidden_size=128, intermediate_size=896)
MODELS = pytest.mark.parametrize("config", [QWEN, MIXTRAL, MANY], ids=["qwen", "mixtral", "many"])


@cache
def weights(config: ModelConfig) -> dict[str, np.ndarray]:
    assert config.experts is not None
    rng, count = np.random.default_rng(0), config.experts.count
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {
        "gate": (count, hidden),
        "gate_proj": (count, hidden, inner),
        "up_proj": (count, hidden, inner),
        "down_proj": (count, inner, hidden),
    }
    return {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


@cache
def compiled(
    config: ModelConfig, rows: int, product: ExpertProduct, invariant: bool = False
) -> Callable[..., np.ndarray]:
    """`(x [rows, hidden], tokens, weights) -> [rows, hidden]`."""
    definition, state = nnx.split(nnx.eval_shape(lambda: SparseMLP(config, jnp.float32)))

    def run(x: jax.Array, tokens: jax.Array, values: dict[str, jax.Array]) -> jax.Array:
        filled = jax.tree.map_with_path(
            lambda path, _: values[[str(k.key) for k in path if hasattr(k, "key")][-2]], state
        )
        mlp = nnx.merge(definition, filled)
        return mlp(x, tokens, dense="xla", product=product)

    options = BATCH_INVARIANT_CPU_OPTIONS if invariant else CPU_OPTIONS
    program = jax.jit(run, compiler_options=options)
    return lambda x, tokens, values: np.asarray(program(jnp.asarray(x), jnp.int32(tokens), values))


def random_rows(rng: np.random.Generator, rows: int, spread: float = 1.0, hidden: int = 64) -> np.ndarray:
    """Little spread sends nearly all rows to the same experts."""
    return (rng.normal(size=hidden) + spread * rng.normal(size=(rows, hidden))).astype(np.float32)


def expected(config: ModelConfig, x: np.ndarray) -> np.ndarray:
    """Row by row in float64; Mixtral's softmax over the scores of the chosen experts alone."""
    assert config.experts is not None
    w = {name: values.astype(np.float64) for name, values in weights(config).items()}
    out = np.zeros(x.shape)
    for row, result in zip(x.astype(np.float64), out, strict=True):
        scores = w["gate"] @ row
        chosen = np.argsort(-scores, kind="stable")[: config.experts.per_token]
        softmax_over = chosen if config.experts.normalized else slice(None)
        total = np.exp(scores[softmax_over] - scores.max()).sum()
        for i in chosen:
            gate, up = row @ w["gate_proj"][i], row @ w["up_proj"][i]
            share = np.exp(scores[i] - scores.max()) / total
            result += share * (gate / (1 + np.exp(-gate)) * up) @ w["down_proj"][i]
    return out


@_WAYS
@MODELS
@settings(max_examples=10, deadline=None)
@given(
    tokens=st.integers(0, 32),
    spread=st.sampled_from([0.0, 0.05, 1.0, 5.0]),
    padding=st.sampled_from([0.0, 1e3, np.nan]),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_float64_whatever_is_in_the_padding(
    config: ModelConfig, product: ExpertProduct, tokens: int, spread: float, padding: float, seed: int
) -> None:
    x = random_rows(np.random.default_rng(seed), 32, spread)
    want = expected(config, x[:tokens])
    x[tokens:] = padding
    out = compiled(config, 32, product)(x, tokens, weights(config))
    np.testing.assert_allclose(out[:tokens], want, rtol=0, atol=2e-4 * max(1, np.abs(want).max(initial=0)))
    assert not out[tokens:].any()


@pytest.mark.parametrize(("config", "rows"), [(MIXTRAL, 1), (MANY, 2), (QWEN, 512)])
def test_the_loop_in_other_buckets(config: ModelConfig, rows: int) -> None:
    assert config.experts is not None
    x = random_rows(np.random.default_rng(rows), rows)
    out = compiled(config, rows, block_rows(rows, config.experts))(x, rows, weights(config))
    want = expected(config, x)
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-4 * max(1, np.abs(want).max()))


def test_the_loop_leaves_experts_alone_that_have_no_tokens() -> None:
    x = random_rows(np.random.default_rng(1), 16, spread=0.05)
    scores = x @ weights(MANY)["gate"].T
    idle = np.setdiff1d(np.arange(64), np.argsort(-scores)[:, :4])
    assert idle.size
    poisoned = {name: values.copy() for name, values in weights(MANY).items()}
    for name in ("gate_proj", "up_proj", "down_proj"):
        poisoned[name][idle] = np.nan
    run = compiled(MANY, 16, 2)
    np.testing.assert_array_equal(run(x, 16, poisoned), run(x, 16, weights(MANY)))


@pytest.mark.parametrize(
    ("tokens", "block"), [(0, 2), (1, 2), (2, 2), (4, 2), (16, 8), (64, 32), (512, 64), (4096, 64)]
)
def test_blocks_are_as_large_as_what_an_expert_gets(tokens: int, block: int) -> None:
    assert block_rows(tokens, ExpertsConfig(count=8, per_token=2, normalized=True)) == block


@pytest.mark.parametrize("config", [LONG_SUMS, MANY], ids=["long sums", "many"])
def test_a_row_has_the_same_bits_in_every_batch_and_bucket(config: ModelConfig) -> None:
    rng, hidden = np.random.default_rng(2), config.hidden_size
    x, others = random_rows(rng, 256, hidden=hidden), random_rows(rng, 512, hidden=hidden)
    alone = compiled(config, 256, BATCH_INVARIANT_BLOCK, invariant=True)(x, 256, weights(config))
    for rows, tokens in ((2, 1), (2, 2), (16, 16), (64, 50), (512, 300)):
        run = compiled(config, rows, BATCH_INVARIANT_BLOCK, invariant=True)
        batch = others[:rows].copy()
        for start in range(0, 256, 61):
            mine = np.arange(start, min(start + tokens, 256), 2)
            where = slice(0, 2 * len(mine), 2)
            batch[where] = x[mine]
            out = run(batch, tokens, weights(config))
            assert out[where].tobytes() == alone[mine].tobytes(), f"{tokens} of {rows}"
