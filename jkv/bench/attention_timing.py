"""Times the attention kernel that an engine would have here."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jkv.bench.attention import AttentionOptions, Timing
from jkv.config import ServeConfig
from jkv.engine.planning import plan_for
from jkv.engine.programs import Platform, ProgramPlan
from jkv.errors import ConfigError
from jkv.kernels.attention import AttentionSpec, read
from jkv.kernels.batch import StepBatch
from jkv.kernels.gpu_blocks import GpuBlocks, Tiles
from jkv.kernels.kv_pool import KvArrays
from jkv.kernels.tpu_blocks import BlockSize, TpuBlocks
from jkv.models.config import ModelConfig, RopeConfig

# Of repetitions that are timed together, so that starting them does not count; the fastest of some rounds.
_SECONDS, _MOST_REPEATS, _ROUNDS = 0.1, 1000, 3

# The page table covers whole blocks of keys, also of those that are tried.
_TABLE_TOKENS = 2048

Blocks = Any


@dataclass(frozen=True, kw_only=True)
class _Case:
    """`queries` of each of `seqs` sequences, the last of their `context` tokens."""

    kind: str
    context: int
    seqs: int
    queries: int

    def keys_seen(self, window: int) -> int:
        """By all queries together."""
        last = range(self.context - self.queries + 1, self.context + 1)
        return self.seqs * sum(min(n, window) for n in last)

    def keys_read(self, window: int) -> int:
        return self.seqs * min(self.context, window + self.queries - 1)


def measure(options: AttentionOptions) -> tuple[list[Timing], str]:
    """Timings of decodes and of a chunk for every context, and the device's and the kernel's names.

    Raises:
        ConfigError: a shape that the device's kernel refuses, or `tune` where its blocks are fixed.
        UnsupportedModelError: likewise.
    """
    plan = plan_of(options)
    spec = plan.attention
    if options.tune and spec.blocks is None:
        raise ConfigError("--tune: the kernel of CPUs has fixed block sizes; tune on a GPU or TPU")
    cases = [
        case
        for context in options.lengths
        for case in (
            _Case(kind="decode", context=context, seqs=options.seqs, queries=1),
            _Case(kind="prefill", context=context, seqs=1, queries=options.chunk),
        )
    ]
    timings = [timing for case in cases for timing in _timings(options, plan, spec, case)]
    return timings, f"{spec.kernel} on {jax.devices()[0].device_kind}"


def plan_of(options: AttentionOptions) -> ProgramPlan:
    """As an engine would have it for a model of one such layer."""
    longest = options.lengths[-1]
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        max_position=-(-longest // _TABLE_TOKENS) * _TABLE_TOKENS,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10_000),
        windows=(options.window,),
        tie_embeddings=True,
    )
    serve = ServeConfig(
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        page_size=options.page_size,
        max_num_seqs=options.seqs,
        max_batched_tokens=options.chunk,
        max_mixed_tokens=options.chunk,
    )
    plan = plan_for(serve, model, cast(Platform, jax.default_backend()), jax.devices())
    pages = options.seqs * -(-longest // options.page_size) + 1
    return dataclasses.replace(plan, pool=dataclasses.replace(plan.pool, pages=pages))


def _timings(
    options: AttentionOptions, plan: ProgramPlan, spec: AttentionSpec, case: _Case
) -> Iterator[Timing]:
    window = options.window or int(np.iinfo(np.int32).max)
    token_bytes = plan.pool.page_bytes // plan.pool.page_size
    kv_bytes = case.keys_read(window) * token_bytes
    copied = _copy_bytes_per_s(kv_bytes)

    def timing(blocks: Blocks, tuned: bool) -> Timing:
        return Timing(
            kind=case.kind,
            context=case.context,
            seconds=_attention_seconds(plan, dataclasses.replace(spec, blocks=blocks), case, window),
            kv_bytes=kv_bytes,
            flops=4 * options.heads * options.head_dim * case.keys_seen(window),
            copy_bytes_per_s=copied,
            blocks=_named(blocks, case.kind),
            tuned=tuned,
        )

    yield timing(spec.blocks, tuned=False)
    if options.tune:
        tried = variants(spec.blocks, case.kind, options.page_size)
        yield min(_tried(timing, tried), key=lambda found: found.seconds)


def _tried(timing: Callable[[Blocks, bool], Timing], variants: Iterator[Blocks]) -> Iterator[Timing]:
    """Timings of the variants that the compiler takes."""
    for blocks in variants:
        try:
            yield timing(blocks, True)
        except jax.errors.JaxRuntimeError:
            continue


def _attention_seconds(plan: ProgramPlan, spec: AttentionSpec, case: _Case, window: int) -> float:
    tokens = case.seqs * case.queries
    config = plan.config
    q = jnp.ones((tokens, config.num_heads, config.head_dim), plan.dtype)
    pool = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), plan.pool.abstract_pool())
    batch = jax.tree.map(jnp.asarray, _batch(plan, case, tokens))

    def repeat(count: jax.Array, q: jax.Array, pool: KvArrays[jax.Array], batch: Any) -> jax.Array:
        attend = partial(read, scale=config.head_dim**-0.5, soft_cap=None, spec=spec)

        def once(_: jax.Array, q: jax.Array) -> jax.Array:
            return attend(q, pool, jnp.int32(0), plan.pool.pages, batch, window=jnp.int32(window))

        return lax.fori_loop(0, count, once, q)

    compiled = jax.jit(repeat).lower(np.int32(1), q, pool, batch).compile()
    return _seconds(lambda count: compiled(np.int32(count), q, pool, batch))


def _batch(plan: ProgramPlan, case: _Case, tokens: int) -> StepBatch[np.ndarray]:
    batch = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype),
        StepBatch.abstract(tokens, plan.max_num_seqs, plan.table_width, 1),
    )
    count = -(-case.context // plan.pool.page_size)
    pages = np.random.default_rng(0).permutation(plan.pool.pages)[: case.seqs * count]
    batch.page_table[: case.seqs, :count] = pages.reshape(case.seqs, count)
    batch.kv_lens[: case.seqs] = case.context
    batch.q_starts[: case.seqs] = np.arange(case.seqs) * case.queries
    batch.q_lens[: case.seqs] = case.queries
    batch.counts[:] = case.seqs if case.queries == 1 else 0, case.seqs
    return batch


def _copy_bytes_per_s(size: int) -> float:
    """Bytes that a copy of `size` bytes reads and writes in a second."""
    words = jnp.zeros(max(1, size // 4), jnp.int32)
    repeat = jax.jit(lambda count, x: lax.fori_loop(0, count, lambda _, x: x + 1, x))
    compiled = repeat.lower(np.int32(1), words).compile()
    return 2 * words.nbytes / _seconds(lambda count: compiled(np.int32(count), words))


def _seconds(run: Callable[[int], jax.Array]) -> float:
    """Of one of the repetitions that `run` makes."""

    def timed(count: int) -> float:
        begun = time.perf_counter()
        run(count).block_until_ready()
        return (time.perf_counter() - begun) / count

    timed(1)
    count = max(1, min(_MOST_REPEATS, int(_SECONDS / timed(1))))
    return min(timed(count) for _ in range(_ROUNDS))


def _named(blocks: Blocks, kind: str) -> str:
    """The sizes that count for decodes, or for chunks; none where the kernel's are fixed."""
    if blocks is None:
        return ""
    part = _part(blocks, kind)
    return " ".join(f"{name}={getattr(part, name)}" for name in _sizes(part, kind))


def _part(blocks: Blocks, kind: str) -> Any:
    if isinstance(blocks, TpuBlocks | GpuBlocks):
        return blocks.decode if kind == "decode" else blocks.prefill
    return blocks


def variants(blocks: Blocks, kind: str, page_size: int) -> Iterator[Blocks]:
    """Blocks around the given ones, themselves included, that differ in what counts for `kind`."""
    part = _part(blocks, kind)
    sizes = _sizes(part, kind)
    for values in itertools.product(*sizes.values()):
        varied = dataclasses.replace(part, **dict(zip(sizes, values, strict=True)))
        if isinstance(varied, BlockSize) and (varied.keys % page_size or varied.copied % varied.keys):
            continue
        yield varied if part is blocks else dataclasses.replace(blocks, **{kind: varied})


def _sizes(part: Any, kind: str) -> dict[str, tuple[int, ...]]:
    """The fields that count for `kind`, and what to try of each."""
    if isinstance(part, BlockSize):
        least = {"queries": 8, "keys": 128, "copied": 128}
    elif isinstance(part, Tiles):
        # A decode's rows are its group of heads.
        least = {"keys": 16, "warps": 1, "stages": 1} | ({"rows": 16} if kind == "prefill" else {})
    elif kind == "decode":
        least = {"decode_keys": 64}
    else:
        least = {"prefill_queries": 16, "prefill_keys": 64}
    return {
        name: tuple(n for n in (size // 2, size, size * 2) if n >= smallest)
        for name, smallest in least.items()
        if (size := getattr(part, name))
    }
