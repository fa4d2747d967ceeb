"""What `python -m jkv.bench device_check` runs on the device itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jkv.bench.attention import AttentionOptions
from jkv.bench.attention_timing import measure as time_attention
from jkv.bench.attention_timing import plan_of
from jkv.bench.device_check import Copies
from jkv.engine.programs import ProgramPlan
from jkv.kernels.attention import AttentionSpec, read
from jkv.kernels.batch import StepBatch
from jkv.kernels.gpu_blocks import GpuChip, gpu_blocks
from jkv.kernels.xla_attention import AttentionBlocks

_PASSES, _COPIES = 5, 16
# The smallest there are, for kernels that are interpreted.
_SMALL = GpuChip(cores=1, shared_memory=64 * 1024)


def measure(options: AttentionOptions, layers: int) -> dict[str, Any]:
    """The fields of `DeviceCheck` that are not the engine's; pages have `layers`."""
    plan = plan_of(options)
    spec = _pallas(plan)
    decode, prefill = time_attention(options)[0]
    return {
        "device": jax.devices()[0].device_kind,
        "kernel": spec.kernel,
        "largest_error": _largest_error(plan, spec),
        "decode": decode,
        "prefill": prefill,
        "copies": _copies(plan.pool.page_bytes * layers),
    }


def _pallas(plan: ProgramPlan) -> AttentionSpec:
    """The engine's kernel; on CPU, which has none in Pallas, a GPU's, interpreted."""
    if plan.platform != "cpu":
        return plan.attention
    config = plan.config
    blocks = gpu_blocks(
        _SMALL,
        head_dim=config.head_dim,
        group=config.num_heads // config.num_kv_heads,
        product_bytes=4,
        stored_bytes=jnp.dtype(plan.pool.dtype).itemsize,
        one_path=False,
    )
    return AttentionSpec(kernel="triton", blocks=blocks, interpret=True)


def _largest_error(plan: ProgramPlan, spec: AttentionSpec) -> float:
    """Of one step of decodes and a chunk, with keys, values and queries of a normal distribution."""
    config, rng = plan.config, np.random.default_rng(0)
    decodes, tokens = plan.max_num_seqs - 1, min(plan.max_batched_tokens, 128)
    pool = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape, np.float32), x.dtype), plan.pool.abstract_pool()
    )
    shape = (tokens, config.num_heads, config.head_dim)
    q = jnp.asarray(rng.standard_normal(shape, np.float32), plan.dtype)
    batch = _ragged(plan, rng, tokens, decodes)

    def attend(spec: AttentionSpec) -> np.ndarray:
        run = jax.jit(
            lambda q, pool, batch: read(
                q,
                pool,
                jnp.int32(0),
                plan.pool.pages,
                batch,
                window=jnp.int32(np.iinfo(np.int32).max),
                scale=config.head_dim**-0.5,
                soft_cap=None,
                spec=spec,
            )
        )
        return np.asarray(run(q, pool, batch), np.float32)

    reference = AttentionSpec(kernel="xla", blocks=AttentionBlocks())
    return float(np.abs(attend(spec) - attend(reference)).max())


def _ragged(plan: ProgramPlan, rng: np.random.Generator, tokens: int, decodes: int) -> StepBatch[np.ndarray]:
    """Decodes of lengths up to the context, and the last tokens of one sequence as a chunk."""
    batch = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype),
        StepBatch.abstract(tokens, plan.max_num_seqs, plan.table_width, 1),
    )
    seqs, longest = decodes + 1, (plan.pool.pages - 1) // plan.max_num_seqs * plan.pool.page_size
    used = -(-longest // plan.pool.page_size)
    batch.page_table[:seqs, :used] = rng.permutation(plan.pool.pages)[: seqs * used].reshape(seqs, used)
    batch.kv_lens[:seqs] = np.linspace(1, longest, seqs).astype(np.int32)
    batch.q_starts[:seqs] = np.arange(seqs)
    batch.q_lens[:seqs] = [1] * decodes + [tokens - decodes]
    batch.counts[:] = decodes, seqs
    return batch


def _copies(page_bytes: int) -> Copies:
    """Of pages as the engine moves them, several at a time."""
    device = jax.devices()[0]
    here = SingleDeviceSharding(device)
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    pages = [jax.device_put(jnp.full(page_bytes, i, jnp.int8), here) for i in range(_COPIES)]
    host = jax.block_until_ready(jax.device_put(pages, pinned))
    return Copies(
        to_device=_speed(host, lambda: jax.device_put(host, here)),
        to_host=_speed(pages, lambda: jax.device_put(pages, pinned)),
    )


def _speed(arrays: Sequence[jax.Array], copy: Callable[[], Any]) -> float:
    """Bytes a second, the median of some passes after one that does not count."""

    def timed() -> float:
        begun = time.perf_counter()
        jax.block_until_ready(copy())
        return time.perf_counter() - begun

    timed()
    return sum(x.nbytes for x in arrays) / statistics.median(timed() for _ in range(_PASSES))
