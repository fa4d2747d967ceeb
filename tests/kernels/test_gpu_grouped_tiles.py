from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.kernels.gpu_blocks import GpuChip
from jkv.kernels.gpu_grouped_tiles import GroupedTiles, grouped_tiles

H100 = GpuChip(cores=132, shared_memory=232448)
A100 = GpuChip(cores=108, shared_memory=166912)
L4 = GpuChip(cores=58, shared_memory=101376)


def _tiles(rows: int, *, chip: GpuChip = H100, product_bytes: int = 2, same: bool = False) -> GroupedTiles:
    return grouped_tiles(chip, rows=rows, experts=128, product_bytes=product_bytes, batch_invariant=same)


def test_what_an_h100_gets_for_128_experts_in_bfloat16() -> None:
    assert _tiles(128) == GroupedTiles(rows=16, columns=64, depth=128, warps=4, stages=4)
    assert _tiles(4096) == GroupedTiles(rows=64, columns=128, depth=64, warps=8, stages=4)
    assert _tiles(2**17) == GroupedTiles(rows=128, columns=128, depth=64, warps=8, stages=4)


@given(
    chip=st.sampled_from([H100, A100, L4]), rows=st.integers(1, 2**20), product_bytes=st.sampled_from([2, 4])
)
def test_tiles_are_powers_of_two_that_fit(chip: GpuChip, rows: int, product_bytes: int) -> None:
    tiles = _tiles(rows, chip=chip, product_bytes=product_bytes)
    for side in (tiles.rows, tiles.columns, tiles.depth):
        assert side >= 16
        assert side & (side - 1) == 0
    assert tiles.stages >= 3
    stage = (tiles.rows + tiles.columns) * tiles.depth * product_bytes
    assert tiles.stages * stage < chip.shared_memory


def test_tiles_grow_with_what_an_expert_gets() -> None:
    heights = [_tiles(2**i).rows for i in range(18)]
    assert heights == sorted(heights)
    assert {16, 32, 64, 128} == set(heights)


@pytest.mark.parametrize("product_bytes", [2, 4])
def test_where_bits_are_promised_tiles_do_not_depend_on_the_rows(product_bytes: int) -> None:
    assert len({_tiles(2**i, product_bytes=product_bytes, same=True) for i in range(18)}) == 1
