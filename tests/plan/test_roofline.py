"""Values worked out by hand for a model of two layers, the second of which sees three keys."""

from __future__ import annotations

import dataclasses

import pytest

from jkv.plan.chips import TPU_V6E, Chip
from jkv.plan.roofline import Roofline, Work, padded

_WORK = Work(
    chips=1,
    hidden_size=4,
    num_heads=2,
    head_dim=8,
    windows=(None, 3),
    layer_weights=1000,
    expert_weights=0,
    experts=0,
    experts_per_token=0,
    head_weights=100,
    weight_bytes=2,
    kv_bytes=64,
    host_kv_bytes=32,
)
_CHIP = Chip(
    name="chip",
    memory_bytes=0,
    flops=100,
    float32_flops=100,
    memory_bytes_per_s=1e6,
    host_bytes_per_s=50,
    link_bytes_per_s=10,
    sources="",
)
BUSY = Roofline(work=_WORK, chip=_CHIP, flops=100)
_STARVED = Roofline(work=_WORK, chip=dataclasses.replace(_CHIP, memory_bytes_per_s=100), flops=1e6)


def test_products_take_two_flops_a_weight_and_the_head_only_where_tokens_are_drawn() -> None:
    assert _WORK.products(rows=4, sampled=1) == 2 * (4 * 1000 + 100)
    assert _WORK.weights_read(rows=4, sampled=1) == 2 * 1100
    assert _WORK.weights_read(rows=4, sampled=0) == 2 * 1000


@pytest.mark.parametrize(
    ("first", "last", "keys"),
    [(0, 5, (1 + 2 + 3 + 4 + 5) + (1 + 2 + 3 + 3 + 3)), (4, 5, 5 + 3), (0, 1, 2), (3, 3, 0)],
)
def test_a_query_sees_the_keys_up_to_its_own_within_the_window(first: int, last: int, keys: int) -> None:
    assert _WORK.keys_seen(first, last) == keys


@pytest.mark.parametrize(("length", "queries", "keys"), [(5, 1, 5 + 3), (5, 2, 5 + 4), (2, 2, 2 + 2)])
def test_a_step_reads_each_key_once(length: int, queries: int, keys: int) -> None:
    assert _WORK.keys_read(length, queries) == keys


def test_attention_is_counted_by_keys() -> None:
    assert _WORK.attention(8) == (2 + 2) * 2 * 8 * 8
    assert _WORK.kv_read(8) == 8 * 32


def test_decodes_are_bound_by_arithmetic_or_by_memory() -> None:
    assert BUSY.decode_tokens_per_s(1, 5) == pytest.approx(100 / (2200 + 512))
    assert _STARVED.decode_tokens_per_s(1, 5) == pytest.approx(100 / (2200 + 256 + 64))


def test_a_step_is_padded_and_the_tokens_that_count_are_not() -> None:
    assert BUSY.decode_tokens_per_s(3, 5) == pytest.approx(3 * 100 / (4 * 2200 + 3 * 512))
    assert [padded(n) for n in (1, 2, 3, 4, 5, 512, 513)] == [1, 2, 4, 4, 8, 512, 1024]


def test_a_prompt_takes_its_chunks_one_after_the_other() -> None:
    seen = (1 + 2 + 3 + 4) + (1 + 2 + 3 + 3)
    assert BUSY.prefill_seconds(5, chunk=4) == pytest.approx((8000 + 64 * seen + 2200 + 512) / 100)


def test_chips_share_the_work_and_add_up_the_layers_outputs() -> None:
    two = Roofline(work=dataclasses.replace(_WORK, chips=2), chip=_CHIP, flops=100)
    sums = 2 * 2 * (2 * (1 / 2) * 1 * 4 * 2) / 10
    assert two.step_seconds(1, 1, 8, 8) == pytest.approx((2200 + 512) / 2 / 100 + sums)


def test_a_token_computes_with_some_experts_and_a_batch_reads_more_of_them() -> None:
    work = dataclasses.replace(_WORK, expert_weights=4000, experts=4, experts_per_token=2)
    assert work.products(rows=3, sampled=0) == 2 * 3 * (1000 + 2000)
    assert work.weights_read(rows=1, sampled=0) == 2 * (1000 + 2000)
    assert work.weights_read(rows=2, sampled=0) == 2 * (1000 + 3000)


def test_pages_come_back_at_the_rate_of_the_hosts_link() -> None:
    assert BUSY.restore_seconds(1000) == 1000 * 32 / 50


def test_a_model_of_8_billion_parameters_decodes_at_most_108_tokens_a_second_on_a_v6e() -> None:
    work = Work(
        chips=1,
        hidden_size=4096,
        num_heads=32,
        head_dim=128,
        windows=(None,) * 32,
        layer_weights=6_979_321_856,
        expert_weights=0,
        experts=0,
        experts_per_token=0,
        head_weights=525_336_576,
        weight_bytes=2,
        kv_bytes=131_072,
        host_kv_bytes=131_072,
    )
    roofline = Roofline(work=work, chip=TPU_V6E, flops=TPU_V6E.flops)
    moved = 15_009_316_864 + 1024 * 131_072 + 131_072
    assert roofline.decode_tokens_per_s(1, 1024) == pytest.approx(1638e9 / moved)
    assert round(roofline.decode_tokens_per_s(1, 1024)) == 108
    assert roofline.restore_seconds(1000) == pytest.approx(0.004096)
