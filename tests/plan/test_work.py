from __future__ import annotations

from jkv.plan.work import parameters, work_of
from tests.engine.plans import LLAMA3_8B, SMOLLM2


def test_the_products_of_llama_3_8b() -> None:
    work = work_of(LLAMA3_8B, "bfloat16", chips=1, kv_bytes=131_072)
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert work.layer_weights == 32 * layer == 6_979_321_856
    assert work.head_weights == 128_256 * 4096
    assert work.weight_bytes == 2
    assert parameters(LLAMA3_8B, "bfloat16") == 8_030_261_248


def test_a_tied_head_is_multiplied_but_counted_once() -> None:
    work = work_of(SMOLLM2, "float32", chips=1, kv_bytes=1)
    assert work.head_weights == 49_152 * 576
    assert work.weight_bytes == 4
    assert parameters(SMOLLM2, "float32") == 134_515_008
