"""Every function the engine dispatches, by name: compiled at warm-up, and compiled for other targets by the
checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jkv.engine.sampling import SampleBatch, Sampled, SamplerState, admit, sample
from jkv.kernels.attention import AttentionSpec
from jkv.kernels.batch import StepBatch
from jkv.kernels.kv_pool import KvArrays, PoolShape
from jkv.kernels.page_transfer import gather_pages, scatter_pages
from jkv.kernels.xla_attention import BATCH_INVARIANT_BLOCKS, AttentionBlocks
from jkv.models.config import ModelConfig
from jkv.models.decoder import StepShape
from jkv.models.forward import forward, logits
from jkv.models.params import Params, abstract_params

_FEW_ROWS = 32

Platform = Literal["cpu", "tpu", "gpu"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """One dispatched function with the shapes it is compiled for; `donated` arguments are updated in
    place.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donated: tuple[int, ...]

    def lower(self, args: tuple[Any, ...] | None = None) -> jax.stages.Lowered:
        """Lowers for the default backend, or for the devices that the shardings of `args` name."""
        return jax.jit(self.fn, donate_argnums=self.donated).lower(*(self.args if args is None else args))


@dataclass(frozen=True, kw_only=True)
class ProgramPlan:
    """What decides which programs an engine has.

    `batch_invariant` leaves out the buckets and block sizes whose rows would round differently: a product of
    one row, and key blocks that differ between prefill and decode.
    """

    platform: Platform
    config: ModelConfig
    dtype: DTypeLike
    pool: PoolShape
    max_num_seqs: int
    max_batched_tokens: int
    table_width: int
    batch_invariant: bool

    @property
    def unroll_layers(self) -> bool:
        """Whether each layer has its own parameters and code: faster on CPU, slower to compile."""
        return self.platform == "cpu"

    @property
    def pinned_pages(self) -> bool:
        """Whether pages are gathered into pinned host memory: not on CPU, where L1 is host memory."""
        return self.platform != "cpu"

    @property
    def attention(self) -> AttentionSpec:
        blocks = BATCH_INVARIANT_BLOCKS if self.batch_invariant else AttentionBlocks()
        return AttentionSpec(kernel="xla", blocks=blocks)

    def weights_first(self, rows: int) -> bool:
        """How a program multiplies `rows` rows by the weights (see `jkv.models.decoder.product`).

        Weights first is faster on CPU where the layers are unrolled, up to a third for the rows of decodes,
        and slower from 128 rows up.
        """
        return self.unroll_layers and not self.batch_invariant and 2 <= rows <= _FEW_ROWS

    @property
    def token_buckets(self) -> tuple[int, ...]:
        """Token counts a step is padded to: powers of two up to the largest batch."""
        return _powers(2 if self.batch_invariant else 1, self.max_batched_tokens)

    @property
    def sample_buckets(self) -> tuple[int, ...]:
        """Row counts a sampling is padded to."""
        return _powers(2 if self.batch_invariant else 1, self.max_num_seqs)

    @property
    def sample_rows(self) -> int:
        """Rows of hidden states that every step returns."""
        return self.sample_buckets[-1]

    @property
    def page_buckets(self) -> tuple[int, ...]:
        """How many pages one program moves; any number is a sum of these, so nothing is padded."""
        return (1, 4, 16)


def table_width(max_model_len: int, page_size: int) -> int:
    """Page-table entries a sequence needs, rounded up to whole key blocks."""
    blocks = AttentionBlocks()
    step = max(blocks.prefill_keys, blocks.decode_keys, page_size)
    return -(-max_model_len // step) * step // page_size


def programs(plan: ProgramPlan) -> Iterator[Program]:
    """All programs of a plan, cheapest to compile first."""
    params = abstract_params(plan.config, plan.dtype, stacked=not plan.unroll_layers)
    state = SamplerState.abstract(plan.max_num_seqs, plan.config.vocab_size)
    yield _admit_program(plan, state)
    for count in plan.page_buckets:
        yield _gather_program(plan, count)
        yield _scatter_program(plan, count)
    for rows in plan.sample_buckets:
        yield _sample_program(plan, params, state, rows)
    for tokens in plan.token_buckets:
        yield _step_program(plan, params, tokens)


def step_name(tokens: int) -> str:
    return f"step/{tokens}"


def sample_name(rows: int) -> str:
    return f"sample/{rows}"


def gather_name(pages: int) -> str:
    return f"gather/{pages}"


def scatter_name(pages: int) -> str:
    return f"scatter/{pages}"


ADMIT = "admit"


def _step_program(plan: ProgramPlan, params: Params, tokens: int) -> Program:
    shape = StepShape(
        pages=plan.pool.pages,
        attention=plan.attention,
        unroll_layers=plan.unroll_layers,
        weights_first=plan.weights_first(tokens),
    )
    return Program(
        name=step_name(tokens),
        fn=partial(forward, plan.config, plan.dtype, shape),
        args=(
            params,
            plan.pool.abstract_pool(),
            jax.ShapeDtypeStruct((plan.max_num_seqs,), jnp.int32),
            StepBatch.abstract(tokens, plan.max_num_seqs, plan.table_width, plan.sample_rows),
        ),
        donated=(1,),
    )


def _sample_program(
    plan: ProgramPlan, params: Params, state: SamplerState[jax.ShapeDtypeStruct], rows: int
) -> Program:
    def fn(
        params: Params, hidden: jax.Array, state: SamplerState[jax.Array], batch: SampleBatch[jax.Array]
    ) -> tuple[Sampled, SamplerState[jax.Array]]:
        scores = logits(plan.config, params, hidden[:rows], weights_first=plan.weights_first(rows))
        return sample(scores, state, batch)

    hidden = jax.ShapeDtypeStruct((plan.sample_rows, plan.config.hidden_size), plan.dtype)
    args = (params.head_only(), hidden, state, SampleBatch.abstract(rows))
    return Program(name=sample_name(rows), fn=fn, args=args, donated=(2,))


def _admit_program(plan: ProgramPlan, state: SamplerState[jax.ShapeDtypeStruct]) -> Program:
    def row(dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((plan.config.vocab_size,), dtype)

    slot = jax.ShapeDtypeStruct((), jnp.int32)
    args = (state, slot, row(jnp.int32), row(jnp.bool_), row(jnp.float32))
    return Program(name=ADMIT, fn=admit, args=args, donated=(0,))


def _gather_program(plan: ProgramPlan, count: int) -> Program:
    shape = plan.pool

    def fn(pool: KvArrays[jax.Array], numbers: jax.Array) -> tuple[KvArrays[jax.Array], ...]:
        copies = gather_pages(pool, numbers, pages=shape.pages, kv_heads=shape.kv_heads)
        return jax.device_put(copies, jax.memory.Space.Host) if plan.pinned_pages else copies

    args = (shape.abstract_pool(), jax.ShapeDtypeStruct((count,), jnp.int32))
    return Program(name=gather_name(count), fn=fn, args=args, donated=())


def _scatter_program(plan: ProgramPlan, count: int) -> Program:
    shape = plan.pool
    numbers, pages = jax.ShapeDtypeStruct((count,), jnp.int32), [shape.abstract_page()] * count
    return Program(
        name=scatter_name(count),
        fn=partial(scatter_pages, pages=shape.pages, kv_heads=shape.kv_heads),
        args=(shape.abstract_pool(), numbers, *pages),
        donated=(0,),
    )


def _powers(first: int, last: int) -> tuple[int, ...]:
    buckets = [first]
    while buckets[-1] < last:
        buckets.append(buckets[-1] * 2)
    return tuple(buckets)
