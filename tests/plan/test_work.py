from __future__ import annotations

from jkv.models.hf_config import from_hf
from jkv.plan.work import parameters, work_of
from tests.engine.plans import LLAMA3_8B, SMOLLM2
from tests.models.golden import config_json


def test_the_products_of_llama_3_8b() -> None:
    work = work_of(LLAMA3_8B, "bfloat16", chips=1, kv_bytes=131_072, host_kv_bytes=131_072)
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert work.layer_weights == 32 * layer == 6_979_321_856
    assert work.head_weights == 128_256 * 4096
    assert work.weight_bytes == 2
    assert parameters(LLAMA3_8B, "bfloat16") == 8_030_261_248


def test_a_tied_head_is_multiplied_but_counted_once() -> None:
    work = work_of(SMOLLM2, "float32", chips=1, kv_bytes=1, host_kv_bytes=1)
    assert work.head_weights == 49_152 * 576
    assert work.weight_bytes == 4
    assert parameters(SMOLLM2, "float32") == 134_515_008


def test_experts_are_counted_apart() -> None:
    model = from_hf(config_json("qwen3_moe"))
    assert model.experts is not None
    work = work_of(model, "float32", chips=1, kv_bytes=1, host_kv_bytes=1)
    one = 3 * model.hidden_size * model.intermediate_size
    assert (work.experts, work.experts_per_token) == (model.experts.count, model.experts.per_token)
    assert work.expert_weights == model.num_layers * model.experts.count * one
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    router = model.experts.count
    assert work.layer_weights == model.num_layers * model.hidden_size * (heads + router)
