from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.kernels.kv_pool import PoolShape, stored_dtype
from jkv.kernels.tpu_blocks import BlockSize, TpuChip, TpuWork, tpu_blocks
from jkv.kernels.tpu_lanes import LANES

CHIPS = {kind: TpuChip.of_kind(kind) for kind in ("TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite")}
_MIB = 2**20


def work(
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 64,
    dtype: str = "bfloat16",
    kv_dtype: str = "bfloat16",
    seqs: int = 64,
    table_width: int = 128,
    tp: int = 1,
) -> TpuWork:
    pool = PoolShape(
        layers=1,
        pages=1,
        page_size=page_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=stored_dtype(kv_dtype, "tpu"),
        tp=tp,
    )
    return TpuWork.of(pool, heads, dtype, seqs, table_width)


@given(
    chip=st.sampled_from([c for kind, c in CHIPS.items() if kind != "TPU v4"]),
    kv_heads=st.sampled_from([1, 2, 3, 8, 32]),
    group=st.sampled_from([1, 3, 4, 8, 71]),
    head_dim=st.sampled_from([64, 128, 256]),
    page_size=st.sampled_from([16, 32, 64, 128, 256]),
    dtypes=st.sampled_from([("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("float32", "float32")]),
    batch_invariant=st.booleans(),
)
def test_blocks_are_whole_pages_within_the_chips_memories(
    chip: TpuChip,
    kv_heads: int,
    group: int,
    head_dim: int,
    page_size: int,
    dtypes: tuple[str, str],
    batch_invariant: bool,
) -> None:
    asked = work(kv_heads * group, kv_heads, head_dim, page_size, *dtypes)
    try:
        found = tpu_blocks(chip, asked, batch_invariant=batch_invariant)
    except ConfigError as error:
        if "int8" in str(error):
            assert (2 * kv_heads * page_size) % LANES
            return
        least = BlockSize(queries=8, keys=max(128, page_size), copied=max(128, page_size))
        assert asked.vmem_bytes(least) > chip.vmem_bytes // 2
        return
    for block in (found.decode, found.prefill):
        assert block.queries & (block.queries - 1) == 0
        assert block.keys % page_size == 0
        assert block.keys % LANES == 0
        assert block.copied % block.keys == 0
        assert asked.vmem_bytes(block) <= chip.vmem_bytes // 2 < found.vmem_limit < chip.vmem_bytes
    if batch_invariant:
        assert found.decode.keys == found.prefill.keys


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite"])
def test_decodes_keep_as_many_bytes_on_their_way_as_the_memory_gives_in_two_microseconds(kind: str) -> None:
    chip = CHIPS[kind]
    for asked in (work(), work(tp=4), work(kv_dtype="int8"), work(9, 3, 64)):
        copied = tpu_blocks(chip, asked, batch_invariant=False).decode.copied
        assert copied * asked.token_bytes >= chip.bytes_per_s * 2e-6 or copied == 4096


def test_a_chip_that_computes_faster_takes_more_queries_for_each_key() -> None:
    rows = {
        kind: 4 * tpu_blocks(chip, work(), batch_invariant=False).prefill.queries
        for kind, chip in CHIPS.items()
    }
    assert rows["TPU v5 lite"] == 256  # 197e12 / 820e9 = 240 operations a byte
    assert rows["TPU v6 lite"] == 512  # 920e12 / 1640e9 = 561, and no more rows than this


def test_devices_that_share_a_model_have_their_own_heads() -> None:
    assert work(tp=4).heads == work(8, 2).heads
    assert work(8, 2, tp=4).heads == work(2, 1).heads
    assert work(tp=4).token_bytes == 2 * 2 * 128 * 2
    assert work(kv_dtype="int8").token_bytes == 2 * 8 * (128 + 4)


def test_a_step_of_few_tokens_has_small_blocks_of_queries() -> None:
    block = BlockSize(queries=128, keys=512, copied=512)
    assert [block.for_tokens(n).queries for n in (9, 16, 100, 512)] == [16, 16, 128, 128]


def test_what_the_chip_cannot_hold_is_refused_by_name() -> None:
    v6e = CHIPS["TPU v6 lite"]
    with pytest.raises(UnsupportedModelError, match=r"head_dim 96 with 3 KV heads.* 576 elements"):
        tpu_blocks(v6e, work(9, 3, 96), batch_invariant=False)
    large = work(32, 32, 128, 256, dtype="float32", kv_dtype="float32")
    with pytest.raises(ConfigError, match=r"--page-size 256.*256 tokens of 32768 bytes.*allowed: 8388608"):
        tpu_blocks(CHIPS["TPU v4"], large, batch_invariant=False)
    with pytest.raises(ConfigError, match=r"--kv-dtype int8, --page-size 16 with 3 KV heads.* 96 elements"):
        tpu_blocks(v6e, work(9, 3, 64, 16, kv_dtype="int8"), batch_invariant=False)
    with pytest.raises(ConfigError, match=r"--max-model-len.*100000 pages.*--max-num-seqs 64"):
        tpu_blocks(v6e, work(table_width=100_000), batch_invariant=False)
    with pytest.raises(ConfigError, match=r"'TPU v3'.*TPU v4, TPU v5 lite"):
        TpuChip.of_kind("TPU v3")


def test_blocks_shrink_to_a_small_memory_and_keep_their_queries_longest() -> None:
    chip, asked = CHIPS["TPU v5 lite"], work(16, 16)
    roomy = tpu_blocks(chip, asked, batch_invariant=False).prefill
    tight = tpu_blocks(dataclasses.replace(chip, vmem_bytes=24 * _MIB), asked, batch_invariant=False).prefill
    assert tight.queries < roomy.queries
    assert tight.keys == roomy.keys
