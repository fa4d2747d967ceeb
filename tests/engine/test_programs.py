"""Rules by which a plan chooses its programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from jkv.cache.pages import Tier
from jkv.engine.programs import programs
from jkv.errors import ConfigError, UnsupportedModelError
from tests.engine import test_gpu_compile, test_tpu_compile
from tests.engine.conftest import Tiny
from tests.engine.harness import random_prompt, request
from tests.engine.plans import PLANS, SMOLLM2, plan_of
from tests.engine.test_tiers import from_tier

_CPU = plan_of(SMOLLM2, dtype="float32", pages=16)


def test_on_cpu_products_of_a_few_rows_take_the_weights_first() -> None:
    few = {1: "xla", 2: "weights_first", 32: "weights_first", 64: "xla"}
    assert {rows: _CPU.dense_product(rows) for rows in few} == few


def test_on_cpu_kernels_take_heads_that_fill_vectors() -> None:
    plan = dataclasses.replace(_CPU, cpu_kernels=True)
    assert plan.attention.kernel == "cpu"
    odd = dataclasses.replace(plan, config=dataclasses.replace(SMOLLM2, head_dim=20))
    assert odd.attention.kernel == "xla"
    assert dataclasses.replace(plan, cpu_kernels=False).attention.kernel == "xla"


def test_batch_invariant_programs_multiply_every_number_of_rows_alike() -> None:
    plan = dataclasses.replace(_CPU, batch_invariant=True, cpu_kernels=False, panels=None)
    assert {plan.dense_product(rows) for rows in plan.token_buckets} == {"xla"}


def test_other_platforms_choose_the_order_themselves() -> None:
    plan = PLANS["smollm2"]
    assert {plan.dense_product(rows) for rows in plan.token_buckets} == {"xla"}


def test_a_plan_is_refused_whose_attention_no_kernel_does() -> None:
    assert plan_of(SMOLLM2, dtype="bfloat16", pages=16, platform="tpu").attention.kernel == "mosaic"
    with pytest.raises(ConfigError, match="--kv-dtype int8, --page-size 16 with 3 KV heads"):
        plan_of(SMOLLM2, dtype="bfloat16", kv_dtype="int8", page_size=16, pages=16, platform="tpu")
    odd = dataclasses.replace(SMOLLM2, head_dim=96)
    with pytest.raises(UnsupportedModelError, match="head_dim 96 with 3 KV heads"):
        plan_of(odd, dtype="bfloat16", pages=16, platform="tpu")
    with pytest.raises(ConfigError, match="TPU v3"):
        plan_of(SMOLLM2, dtype="bfloat16", pages=16, platform="tpu", device_kind="TPU v3")


class _Recorded(dict[str, Callable[..., Any]]):
    """Compiled programs that note which of them are taken."""

    def __init__(self, compiled: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(compiled)
        self.taken: set[str] = set()

    def __getitem__(self, name: str) -> Callable[..., Any]:
        self.taken.add(name)
        return super().__getitem__(name)


def test_whatever_is_dispatched_is_registered_and_compiled_for_other_targets(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = tiny(tiers=True)
    recorded = _Recorded(bench.runner._compiled)
    monkeypatch.setattr(bench.runner, "_compiled", recorded)
    prompt = request(random_prompt(1, 200), 4, temperature=1.0, repetition_penalty=1.2, logit_bias={5: 2.0})
    bench.one(prompt)
    for tier in Tier:
        from_tier(bench, tier, prompt)
    kinds = {name.split("/")[0] for name in recorded.taken}
    assert recorded.taken <= {program.name for program in programs(bench.runner.plan)}
    assert kinds == {program.name.split("/")[0] for program in programs(bench.runner.plan)}
    for compiled in (test_tpu_compile.COMPILED, test_gpu_compile.COMPILED):
        assert kinds <= {name.split("/")[0] for name in compiled}
