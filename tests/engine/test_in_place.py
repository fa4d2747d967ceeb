"""On CPU too, no program copies what it is given to update: one copy of the pool costs more than a decode."""

from __future__ import annotations

import dataclasses

import pytest

from jkv.engine.programs import ADMIT, ProgramPlan, programs, sample_name, step_name
from tests.engine.plans import SMOLLM2, plan_of

_TINY = dataclasses.replace(
    SMOLLM2, vocab_size=2048, hidden_size=64, intermediate_size=96, num_layers=2, windows=(None, 100)
)
_FLOAT32 = plan_of(_TINY, dtype="float32", pages=4096, max_num_seqs=2, max_batched_tokens=32)
_PLANS = {
    "float32": _FLOAT32,
    "bfloat16 kv": plan_of(
        _TINY, dtype="float32", kv_dtype="bfloat16", pages=4096, max_num_seqs=2, max_batched_tokens=32
    ),
    "int8 kv": plan_of(
        _TINY, dtype="float32", kv_dtype="int8", pages=4096, max_num_seqs=2, max_batched_tokens=32
    ),
}


@pytest.mark.parametrize(
    ("plan", "tokens"),
    [
        *(("float32", tokens) for tokens in _FLOAT32.token_buckets),
        *((plan, tokens) for plan in ("bfloat16 kv", "int8 kv") for tokens in (1, 32)),
    ],
)
def test_a_step_of_any_bucket_writes_the_pool_in_place(plan: str, tokens: int) -> None:
    pool = _PLANS[plan].pool
    alias, temporaries = _needs(_PLANS[plan], step_name(tokens))
    assert alias == pool.pages * pool.page_bytes
    assert temporaries < 4 * 2**20


@pytest.mark.parametrize("program", [ADMIT, sample_name(1), sample_name(2)])
def test_sampling_keeps_its_state_in_place(program: str) -> None:
    alias, temporaries = _needs(_FLOAT32, program)
    assert alias == 2 * 4 + 2 * _TINY.vocab_size * (4 + 1 + 4)
    assert temporaries < 2**20


def _needs(plan: ProgramPlan, name: str) -> tuple[int, int]:
    """Alias and temporary bytes."""
    program = next(p for p in programs(plan) if p.name == name)
    memory = program.lower().compile().memory_analysis()
    assert memory is not None
    return memory.alias_size_in_bytes, memory.temp_size_in_bytes
