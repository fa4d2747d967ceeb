"""A mixture of experts (Shazeer et al., arXiv:1701.06538; Mixtral, arXiv:2401.04088).

Tokens are sorted by expert, so that each expert multiplies one run of rows. TPUs do that in one ragged
product for all experts, which XLA:GPU and XLA:CPU would expand into a dense product with every expert. GPUs
have a kernel for it. On CPU a loop takes the experts that have tokens one after the other, a block of rows at
a time, and reads only their weights.

Experts' weights are `[experts, in, out]`, unlike all others. Of `[experts, out, in]` XLA:TPU copies the
weights of all experts into this order in every layer of a step, and the loop on CPU takes up to twice as
long.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jkv.kernels.gpu_grouped import grouped_product
from jkv.kernels.gpu_grouped_tiles import GroupedTiles
from jkv.kernels.mesh import TP, WHOLE, DeviceMesh
from jkv.models.config import Activation, ExpertsConfig, ModelConfig
from jkv.models.layers import DenseProduct, Linear, activate, product
from jkv.models.sharding import expert_partition

# How experts multiply their rows: by the loop, so many rows at a time; by the GPU's kernel; or, if None, by
# XLA's ragged product.
ExpertProduct = int | GroupedTiles | None

_LARGEST_BLOCK = 64
# Rows of products of one shape have the same bits wherever they stand.
BATCH_INVARIANT_BLOCK = 16


class SparseMLP(nnx.Module):
    """The router and its experts. Attribute names are those of Qwen3-MoE's tensors."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        assert config.experts is not None
        self.count, self.per_token = config.experts.count, config.experts.per_token
        self.normalized = config.experts.normalized
        self.gate = Linear(config.hidden_size, self.count, bias=False, dtype=dtype)
        self.experts = Experts(config, dtype)

    def __call__(
        self,
        x: jax.Array,
        tokens: jax.Array,
        *,
        dense: DenseProduct,
        product: ExpertProduct,
        mesh: DeviceMesh | None = None,
        whole_experts: bool = False,
    ) -> jax.Array:
        """`[T, hidden] -> [T, hidden]`; rows from `tokens` on are padding, go to no expert and give zeros.

        Args:
            mesh: devices that have a part of each expert, or `whole_experts`, as many each.
        """
        weights, chosen = self._route(x, dense=dense)
        used = (jnp.arange(x.shape[0]) < tokens)[:, None]
        expert = jnp.where(used, chosen, self.count).reshape(-1)
        # What stands in the padding may be NaN, and its weights with it.
        weights = jnp.where(used, weights, 0)
        if mesh is None:
            return self._weighted(x, weights, expert, self.experts, product)
        definition, parts = nnx.split(self.experts)

        def local(x: jax.Array, weights: jax.Array, expert: jax.Array, state: nnx.State) -> jax.Array:
            experts = nnx.merge(definition, state)
            first = lax.axis_index(TP) * experts.count if whole_experts else 0
            return lax.psum(self._weighted(x, weights, expert - first, experts, product), TP)

        split = jax.tree.map_with_path(
            lambda path, _: expert_partition(str(path[0].key), whole=whole_experts), parts
        )
        over_devices = jax.shard_map(
            local, mesh=mesh, in_specs=(WHOLE, WHOLE, WHOLE, split), out_specs=WHOLE, check_vma=False
        )
        return over_devices(x, weights, expert, parts)

    def _weighted(
        self,
        x: jax.Array,
        weights: jax.Array,
        expert: jax.Array,
        experts: Experts,
        product: ExpertProduct,
    ) -> jax.Array:
        """What these experts add to the result; `expert`, `[T * per_token]`, may also be none of them."""
        here = (expert >= 0) & (expert < experts.count)
        # What is not for them sorts behind them.
        expert = jnp.where(here, expert, experts.count)
        order = jnp.argsort(expert, stable=True)
        # A sum where bincount would scatter, for which XLA:TPU's compiler overflows its stack in some steps.
        sizes = jnp.sum(expert[:, None] == jnp.arange(experts.count), axis=0, dtype=jnp.int32)
        rows = x[order // self.per_token]
        out = experts(rows, sizes, product)
        out = jnp.where(here[:, None], out[jnp.argsort(order)], 0)
        by_token = out.reshape(x.shape[0], self.per_token, -1)
        # Added one after the other: the order of a reduction could depend on its shape.
        total = by_token[:, 0] * weights[:, :1]
        for i in range(1, self.per_token):
            total += by_token[:, i] * weights[:, i : i + 1]
        return total

    def _route(self, x: jax.Array, *, dense: DenseProduct) -> tuple[jax.Array, jax.Array]:
        """Weights `[T, per_token]` in x's dtype and expert numbers, likeliest first."""
        scores = product(x, self.gate.weight.get_value(), dense=dense, dtype=jnp.float32)
        weights, chosen = lax.top_k(jax.nn.softmax(scores, axis=-1), self.per_token)
        if self.normalized:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return weights.astype(x.dtype), chosen


class ExpertLinear(nnx.Module):
    """The weights of one projection of all experts, `[experts, in, out]`."""

    def __init__(self, experts: int, inputs: int, outputs: int, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.zeros((experts, inputs, outputs), dtype))


class Experts(nnx.Module):
    """Gated MLPs over rows sorted by expert: `sizes[i]` of them are for expert i, and what lies behind them
    has no expert and gives unspecified rows.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        assert config.experts is not None
        count, size, inner = config.experts.count, config.hidden_size, config.intermediate_size
        self.gate_proj = ExpertLinear(count, size, inner, dtype)
        self.up_proj = ExpertLinear(count, size, inner, dtype)
        self.down_proj = ExpertLinear(count, inner, size, dtype)
        self.activation: Activation = config.activation

    @property
    def count(self) -> int:
        """How many there are, on this device where several have them."""
        return self.gate_proj.weight.shape[0]

    def __call__(self, rows: jax.Array, sizes: jax.Array, product: ExpertProduct) -> jax.Array:
        if isinstance(product, int):
            return self._loop(rows, sizes, product)
        return self._at_once(rows, sizes, product)

    def _at_once(self, rows: jax.Array, sizes: jax.Array, tiles: GroupedTiles | None) -> jax.Array:
        """All experts in one product."""

        def multiply(x: jax.Array, projection: ExpertLinear) -> jax.Array:
            if tiles is None:
                return lax.ragged_dot(x, projection.weight[...], sizes)
            return grouped_product(x, projection.weight[...], sizes, tiles)

        inner = activate(multiply(rows, self.gate_proj), self.activation) * multiply(rows, self.up_proj)
        return multiply(inner, self.down_proj)

    def _loop(self, rows: jax.Array, sizes: jax.Array, block: int) -> jax.Array:
        """One expert after the other, `block` rows at a time."""
        # The last block of an expert reaches past its rows: behind the last expert's there must be some.
        padded = jnp.pad(rows, ((0, block), (0, 0)))
        starts = jnp.cumsum(sizes) - sizes
        busy = jnp.argsort(sizes == 0, stable=True)  # those with rows first, in order

        def one_expert(i: jax.Array, out: jax.Array) -> jax.Array:
            expert = busy[i]
            gate, up, down = (p.weight[...][expert] for p in (self.gate_proj, self.up_proj, self.down_proj))

            def one_block(j: jax.Array, out: jax.Array) -> jax.Array:
                at = starts[expert] + j * block
                x = lax.dynamic_slice_in_dim(padded, at, block)
                inner = activate(x @ gate, self.activation) * (x @ up)
                # What spills into the next expert's rows is overwritten by that one.
                return lax.dynamic_update_slice_in_dim(out, inner @ down, at, 0)

            return lax.fori_loop(0, (sizes[expert] + block - 1) // block, one_block, out)

        return lax.fori_loop(0, jnp.sum(sizes > 0), one_expert, jnp.zeros_like(padded))[: rows.shape[0]]


def block_rows(tokens: int, config: ExpertsConfig) -> int:
    """Rows of a block for a step of `tokens`: the power of two above what an expert gets on average, within
    limits.
    """
    average = tokens * config.per_token // config.count
    return min(max(2, 1 << average.bit_length()), _LARGEST_BLOCK)
