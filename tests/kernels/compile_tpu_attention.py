"""Compiles the TPU's attention kernel alone, for shapes in CASES, and prints what each needs as a JSON line:
`python -m tests.kernels.compile_tpu_attention TARGET CASE ...`, in a process with the target's environment.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jkv.kernels.batch import StepBatch
from jkv.kernels.kv_pool import PoolShape
from jkv.kernels.tpu_attention import paged_attention
from jkv.kernels.tpu_blocks import TpuBlocks, TpuChip, TpuWork, tpu_blocks
from jkv.plan.compiling import devices, placed
from jkv.plan.targets import TARGETS

_SEQS, _LAYERS, _MAX_LEN = 64, 32, 32768


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call's shapes; few heads, for each takes time to compile."""

    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 64
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    tokens: int = 512
    soft_cap: float | None = None

    @property
    def pool(self) -> PoolShape:
        """Of more than 2^31 elements."""
        layer_page = _LAYERS * self.page_size * 2 * self.kv_heads * self.head_dim
        return PoolShape(
            layers=_LAYERS,
            pages=2**31 // layer_page + 1,
            page_size=self.page_size,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=jnp.dtype(self.kv_dtype),
        )

    @property
    def table_width(self) -> int:
        return _MAX_LEN // self.page_size


USUAL = {
    "heads of 64": Case(head_dim=64, page_size=16),
    "heads of 96, int8": Case(kv_heads=4, head_dim=96, kv_dtype="int8", page_size=16),
    "heads of 256, soft cap": Case(head_dim=256, soft_cap=50, page_size=256),
    "mqa, one token": Case(kv_heads=1, tokens=1),
    "float32": Case(heads=4, kv_heads=2, head_dim=64, dtype="float32", kv_dtype="float32"),
}
CASES = {
    **USUAL,
    "llama3-8b": Case(heads=32, kv_heads=8),
    "mha": Case(heads=32, kv_heads=32, head_dim=96, page_size=16),
    "odd groups, int8": Case(heads=9, kv_heads=3, head_dim=64, kv_dtype="int8"),
    "float32 queries": Case(dtype="float32", head_dim=64, kv_dtype="int8"),
    **{
        f"heads of {dim}, pages of {size}, {kv}": Case(kv_heads=4, head_dim=dim, page_size=size, kv_dtype=kv)
        for dim in (64, 96, 128, 256)
        for size in (16, 32, 64, 128, 256)
        for kv in ("bfloat16", "float32", "int8")
    },
}


def main(target: str, *names: str) -> None:
    device = devices(TARGETS[target])[0]
    with ThreadPoolExecutor(2) as pool:
        for line in pool.map(lambda name: json.dumps({"case": name, **_needs(CASES[name], device)}), names):
            print(line, flush=True)


def _needs(case: Case, device: Any) -> dict[str, Any]:
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    args = (
        jax.ShapeDtypeStruct((case.tokens, case.heads, case.head_dim), jnp.dtype(case.dtype)),
        case.pool.abstract_pool(),
        scalar,
        StepBatch.abstract(case.tokens, _SEQS, case.table_width, _SEQS),
        scalar,
    )
    blocks = _tight_blocks(case, TpuChip.of(device))

    def run(q: Any, pool: Any, layer: Any, batch: Any, window: Any) -> jax.Array:
        attend = partial(paged_attention, scale=case.head_dim**-0.5, soft_cap=case.soft_cap, blocks=blocks)
        return attend(q, pool, layer, case.pool.pages, batch, window=window, interpret=False)

    compiled = jax.jit(run).lower(*placed(args, device)).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    return {
        "temporaries": memory.temp_size_in_bytes,
        "kernels": len(re.findall(r'custom_call_target="tpu_custom_call"', text)),
    }


def _tight_blocks(case: Case, chip: TpuChip) -> TpuBlocks:
    """With no more vector memory than what jkv's arithmetic says that they need."""
    work = TpuWork.of(case.pool, case.heads, case.dtype, _SEQS, case.table_width)
    blocks = tpu_blocks(chip, work, batch_invariant=False)
    needed = max(map(work.vmem_bytes, (blocks.decode, blocks.prefill)))
    return dataclasses.replace(blocks, vmem_limit=needed)


if __name__ == "__main__":
    main(*sys.argv[1:])
