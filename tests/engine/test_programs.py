"""Rules by which a plan chooses its programs."""

from __future__ import annotations

import dataclasses

from tests.engine.plans import SMOLLM2, TPU_PLANS, plan_of

_CPU = plan_of(SMOLLM2, dtype="float32", pages=16)


def test_on_cpu_products_of_a_few_rows_take_the_weights_first() -> None:
    rows = (*_CPU.token_buckets, *_CPU.sample_buckets)
    assert {r for r in rows if _CPU.weights_first(r)} == {2, 4, 8, 16, 32}


def test_batch_invariant_programs_multiply_every_number_of_rows_alike() -> None:
    plan = dataclasses.replace(_CPU, batch_invariant=True)
    assert not any(plan.weights_first(rows) for rows in plan.token_buckets)


def test_other_platforms_choose_the_order_themselves() -> None:
    plan = TPU_PLANS["smollm2"]
    assert not any(plan.weights_first(rows) for rows in plan.token_buckets)
