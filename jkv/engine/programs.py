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
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jkv.engine.packing import packed_size, unpack
from jkv.engine.sampling import SampleBatch, Sampled, SamplerState, admit, sample
from jkv.kernels.attention import AttentionSpec
from jkv.kernels.batch import StepBatch
from jkv.kernels.cpu_attention import DIM_MULTIPLE
from jkv.kernels.gpu_blocks import GpuBlocks, GpuChip, gpu_blocks
from jkv.kernels.gpu_grouped_tiles import grouped_tiles
from jkv.kernels.kv_pool import KvArrays, PoolShape
from jkv.kernels.mesh import PAGE, WHOLE, DeviceMesh, placed, pool_partition, shardings, split, tp_of, whole
from jkv.kernels.page_transfer import gather_pages, scatter_pages
from jkv.kernels.split_transfer import gather_split_pages, scatter_split_pages, sent_pages
from jkv.kernels.tpu_blocks import TpuBlocks, TpuChip, TpuWork, tpu_blocks
from jkv.kernels.xla_attention import BATCH_INVARIANT_BLOCKS, AttentionBlocks
from jkv.models.config import ModelConfig
from jkv.models.decoder import StepShape
from jkv.models.experts import BATCH_INVARIANT_BLOCK, ExpertProduct, block_rows
from jkv.models.forward import forward, logits
from jkv.models.layers import DenseProduct
from jkv.models.panels import Encodings
from jkv.models.params import Params, abstract_params
from jkv.models.sharding import widened

# Up to so many rows, XLA's products are faster with the weights first.
_FEW_ROWS = 32

Platform = Literal["cpu", "tpu", "gpu"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """One dispatched function with the shapes it is compiled for; `donated` arguments are updated in
    place. `out_shardings`, of which None leaves the choice to the compiler, are for outputs over a mesh.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donated: tuple[int, ...]
    out_shardings: Any = None

    def lower(self, args: tuple[Any, ...] | None = None) -> jax.stages.Lowered:
        """Lowers for the default backend, or for the devices that the shardings of `args` name."""
        return self.jitted().lower(*(self.args if args is None else args))

    def jitted(self) -> Any:
        """The function as jax traces it."""
        return jax.jit(self.fn, donate_argnums=self.donated, out_shardings=self.out_shardings)


@dataclass(frozen=True, kw_only=True)
class ProgramPlan:
    """What decides which programs an engine has.

    `batch_invariant` leaves out the buckets and block sizes whose rows would round differently: a product of
    one row, and key blocks that differ between prefill and decode. `mesh` has the devices that share the
    model, as many as `pool.tp`; None is one device. With `whole_experts` each has some of a mixture's, else a
    part of each. `tpu` and `gpu` are what kernels are cut for where the platform is one; with `cpu_kernels`
    CPUs have theirs (see jkv.kernels.cpu_library), which are not batch-invariant, and multiply by the weights
    in `panels`.
    """

    platform: Platform
    config: ModelConfig
    dtype: DTypeLike
    pool: PoolShape
    max_num_seqs: int
    max_batched_tokens: int
    table_width: int
    batch_invariant: bool
    tpu: TpuChip | None = None
    gpu: GpuChip | None = None
    cpu_kernels: bool = False
    panels: Encodings | None = None
    mesh: DeviceMesh | None = None
    whole_experts: bool = False

    def __post_init__(self) -> None:
        assert self.pool.tp == tp_of(self.mesh)
        assert (self.tpu is not None) == (self.platform == "tpu")
        assert (self.gpu is not None) == (self.platform == "gpu")
        assert not self.cpu_kernels or (self.platform == "cpu" and not self.batch_invariant)
        assert not self.panels or (self.platform == "cpu" and self.mesh is None)
        # Refuses what the platform's kernel cannot do before anything is loaded.
        _ = self.attention

    def abstract_pool(self) -> KvArrays[jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of the KV pool."""
        pool = self.pool.abstract_pool()
        return placed(pool, self.mesh, pool_partition(pool))

    def abstract_state(self) -> SamplerState[jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of what the sampler remembers: every device has all of it."""
        return placed(SamplerState.abstract(self.max_num_seqs, self.config.vocab_size), self.mesh)

    def step_layout(self, tokens: int) -> StepBatch[jax.ShapeDtypeStruct]:
        """The metadata of a step padded to `tokens`."""
        return StepBatch.abstract(tokens, self.max_num_seqs, self.table_width, self.sample_rows)

    def sharding(self, partition: PartitionSpec, memory_kind: str | None = None) -> NamedSharding | None:
        """Of a program's output; None where there is one device."""
        return None if self.mesh is None else NamedSharding(self.mesh, partition, memory_kind=memory_kind)

    @property
    def across_processes(self) -> bool:
        """Whether the devices belong to several processes: process 0 then has pages as a whole."""
        return isinstance(self.mesh, Mesh) and len({d.process_index for d in self.mesh.devices.flat}) > 1

    @property
    def unroll_layers(self) -> bool:
        """Whether each layer has its own parameters and code: slower to compile, but faster on CPU, and under
        scan XLA:GPU copies every layer's weights out of the stack before it multiplies by them, as XLA:TPU
        does with experts' weights.
        """
        return self.platform != "tpu" or self.config.experts is not None

    @property
    def pinned_pages(self) -> bool:
        """Whether pages are gathered into pinned host memory: not on CPU, where L1 is host memory."""
        return self.platform != "cpu"

    @property
    def attention(self) -> AttentionSpec:
        if self.tpu is not None:
            return AttentionSpec(kernel="mosaic", blocks=self._tpu_blocks(self.tpu), mesh=self.mesh)
        if self.gpu is not None:
            return AttentionSpec(kernel="triton", blocks=self._gpu_blocks(self.gpu), mesh=self.mesh)
        if self.cpu_kernels and self.config.head_dim % DIM_MULTIPLE == 0:
            return AttentionSpec(kernel="cpu", blocks=None, mesh=self.mesh)
        blocks = BATCH_INVARIANT_BLOCKS if self.batch_invariant else AttentionBlocks()
        return AttentionSpec(kernel="xla", blocks=blocks, mesh=self.mesh)

    def _tpu_blocks(self, chip: TpuChip) -> TpuBlocks:
        heads = self.config.num_heads
        work = TpuWork.of(self.pool, heads, self.dtype, self.max_num_seqs, self.table_width)
        return tpu_blocks(chip, work, batch_invariant=self.batch_invariant)

    def _gpu_blocks(self, chip: GpuChip) -> GpuBlocks:
        config = widened(self.config, self.pool.tp)
        stored = self.pool.dtype if not self.pool.quantized else self.dtype
        return gpu_blocks(
            chip,
            head_dim=config.head_dim,
            group=config.num_heads // config.num_kv_heads,
            product_bytes=jnp.promote_types(self.dtype, stored).itemsize,
            stored_bytes=jnp.dtype(self.pool.dtype).itemsize,
            one_path=self.batch_invariant,
        )

    def expert_product(self, tokens: int) -> ExpertProduct:
        """How a step of `tokens` goes through a mixture of experts."""
        experts = self.config.experts
        if self.platform == "tpu" or experts is None:
            return None
        if self.gpu is not None:
            return grouped_tiles(
                self.gpu,
                rows=tokens * experts.per_token,
                experts=experts.count,
                product_bytes=jnp.dtype(self.dtype).itemsize,
                batch_invariant=self.batch_invariant,
            )
        return BATCH_INVARIANT_BLOCK if self.batch_invariant else block_rows(tokens, experts)

    def dense_product(self, rows: int) -> DenseProduct:
        """How a program multiplies `rows` rows by weights that are not in panels."""
        if self.platform == "cpu" and not self.batch_invariant and 2 <= rows <= _FEW_ROWS:
            return "weights_first"
        return "xla"

    @property
    def _least_rows(self) -> int:
        """Two where one row would round differently, and where devices share the model: of an embedding split
        over them XLA looks one row up in a copy of all.
        """
        return 2 if self.batch_invariant or self.mesh is not None else 1

    @property
    def token_buckets(self) -> tuple[int, ...]:
        """Token counts a step is padded to: powers of two up to the largest batch."""
        return _powers(self._least_rows, self.max_batched_tokens)

    @property
    def sample_buckets(self) -> tuple[int, ...]:
        """Row counts a sampling is padded to. XLA:GPU does not compile one row's."""
        return _powers(2 if self.platform == "gpu" else self._least_rows, self.max_num_seqs)

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
    params = abstract_params(
        plan.config,
        plan.dtype,
        stacked=not plan.unroll_layers,
        mesh=plan.mesh,
        whole_experts=plan.whole_experts,
        panels=plan.panels,
    )
    yield _admit_program(plan)
    for count in plan.page_buckets:
        yield _gather_program(plan, count)
        yield _scatter_program(plan, count)
    for rows in plan.sample_buckets:
        yield _sample_program(plan, params, rows)
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


def weights(params: Params) -> list[Any]:
    """The programs' first argument: the leaves alone. Params would be flattened at every call, and nnx does
    that in Python: 1.5 ms a step for 30 layers.
    """
    return jax.tree.leaves(params)


def _on_weights(fn: Callable[..., Any], params: Params) -> Callable[..., Any]:
    """`fn` of Params as a function of their `weights`."""
    structure = jax.tree.structure(params)
    return lambda leaves, *rest: fn(structure.unflatten(leaves), *rest)


def _step_program(plan: ProgramPlan, params: Params, tokens: int) -> Program:
    shape = StepShape(
        pages=plan.pool.pages,
        attention=plan.attention,
        unroll_layers=plan.unroll_layers,
        dense_product=plan.dense_product(tokens),
        expert_product=plan.expert_product(tokens),
        whole_experts=plan.whole_experts,
    )
    layout = plan.step_layout(tokens)

    def fn(
        params: Params, pool: KvArrays[jax.Array], last_tokens: jax.Array, packed: jax.Array
    ) -> tuple[jax.Array, KvArrays[jax.Array]]:
        config = widened(plan.config, plan.pool.tp)
        return forward(config, plan.dtype, shape, params, pool, last_tokens, unpack(packed, layout))

    pool, last_tokens = plan.abstract_pool(), jax.ShapeDtypeStruct((plan.max_num_seqs,), jnp.int32)
    packed = jax.ShapeDtypeStruct((packed_size(layout),), jnp.int32)
    return Program(
        name=step_name(tokens),
        fn=_on_weights(fn, params),
        args=(weights(params), pool, placed(last_tokens, plan.mesh), placed(packed, plan.mesh)),
        donated=(1,),
        out_shardings=None if plan.mesh is None else (plan.sharding(WHOLE), shardings(pool)),
    )


def _sample_program(plan: ProgramPlan, params: Params, rows: int) -> Program:
    layout, head = SampleBatch.abstract(rows), params.head_only()

    def fn(
        params: Params, hidden: jax.Array, state: SamplerState[jax.Array], packed: jax.Array
    ) -> tuple[Sampled, SamplerState[jax.Array]]:
        scores = logits(plan.config, params, hidden[:rows], dense=plan.dense_product(rows))
        # Without the first of the two, XLA gathers the weights and not their products.
        return sample(whole(split(scores, plan.mesh), plan.mesh), state, unpack(packed, layout))

    hidden = jax.ShapeDtypeStruct((plan.sample_rows, plan.config.hidden_size), plan.dtype)
    packed = jax.ShapeDtypeStruct((packed_size(layout),), jnp.int32)
    return Program(
        name=sample_name(rows),
        fn=_on_weights(fn, head),
        args=(
            weights(head),
            placed(hidden, plan.mesh),
            plan.abstract_state(),
            placed(packed, plan.mesh),
        ),
        donated=(2,),
        out_shardings=plan.sharding(WHOLE),
    )


def _admit_program(plan: ProgramPlan) -> Program:
    def row(dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((plan.config.vocab_size,), dtype)

    slot = jax.ShapeDtypeStruct((), jnp.int32)
    history = (slot, row(jnp.int32), row(jnp.bool_), row(jnp.float32))
    return Program(
        name=ADMIT,
        fn=admit,
        args=(plan.abstract_state(), *placed(history, plan.mesh)),
        donated=(0,),
        out_shardings=plan.sharding(WHOLE),
    )


def _gather_program(plan: ProgramPlan, count: int) -> Program:
    shape, mesh = plan.pool, plan.mesh

    def fn(pool: KvArrays[jax.Array], numbers: jax.Array) -> tuple[KvArrays[jax.Array], ...]:
        if mesh is None:
            copies = gather_pages(pool, numbers, pages=shape.pages, kv_heads=shape.kv_heads)
        else:
            copies = gather_split_pages(pool, numbers, shape=shape, mesh=mesh)
        if plan.across_processes:
            copies = jax.tree.map(lambda x: whole(x, mesh), copies)
        return jax.device_put(copies, jax.memory.Space.Host) if plan.pinned_pages else copies

    numbers = placed(jax.ShapeDtypeStruct((count,), jnp.int32), mesh)
    return Program(
        name=gather_name(count),
        fn=fn,
        args=(plan.abstract_pool(), numbers),
        donated=(),
        out_shardings=plan.sharding(
            WHOLE if plan.across_processes else PAGE, "pinned_host" if plan.pinned_pages else None
        ),
    )


def _scatter_program(plan: ProgramPlan, count: int) -> Program:
    shape, mesh, pool = plan.pool, plan.mesh, plan.abstract_pool()
    if mesh is None:
        fn = partial(scatter_pages, pages=shape.pages, kv_heads=shape.kv_heads)
    else:
        fn = partial(scatter_split_pages, shape=shape, mesh=mesh, sent=plan.across_processes)
    numbers = placed(jax.ShapeDtypeStruct((count,), jnp.int32), mesh)
    page = sent_pages(shape) if plan.across_processes else shape.abstract_page()
    return Program(
        name=scatter_name(count),
        fn=fn,
        args=(pool, numbers, *[placed(page, mesh, PAGE)] * count),
        donated=(0,),
        out_shardings=None if mesh is None else shardings(pool),
    )


def _powers(first: int, last: int) -> tuple[int, ...]:
    buckets = [first]
    while buckets[-1] < last:
        buckets.append(buckets[-1] * 2)
    return tuple(buckets)
