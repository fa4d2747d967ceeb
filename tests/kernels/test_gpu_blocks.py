from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.errors import UnsupportedModelError
from jkv.kernels.gpu_blocks import GpuBlocks, GpuChip, gpu_blocks

H100 = GpuChip(cores=132, shared_memory=232448)
A100 = GpuChip(cores=108, shared_memory=166912)
L4 = GpuChip(cores=58, shared_memory=101376)


def test_what_an_h100_gets_for_heads_of_128_in_bfloat16() -> None:
    blocks = _blocks(H100, head_dim=128, group=4)
    assert (blocks.decode.rows, blocks.decode.keys) == (16, 64)
    assert (blocks.prefill.rows, blocks.prefill.keys) == (128, 64)
    assert blocks.prefill.queries(4) == 32
    assert blocks.programs == 264
    assert blocks.extra_splits(8) == 66


@given(
    chip=st.sampled_from([H100, A100, L4]),
    head_dim=st.integers(1, 256),
    group=st.integers(1, 128),
    element_bytes=st.sampled_from([(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]),
)
def test_tiles_are_powers_of_two_that_fit(
    chip: GpuChip, head_dim: int, group: int, element_bytes: tuple[int, int]
) -> None:
    product_bytes, stored_bytes = element_bytes
    try:
        blocks = _blocks(
            chip, head_dim=head_dim, group=group, product_bytes=product_bytes, stored_bytes=stored_bytes
        )
    except UnsupportedModelError:
        assert group > 32
        assert chip == L4 or product_bytes == 4
        return
    width = max(16, 1 << (head_dim - 1).bit_length())
    for tiles in (blocks.decode, blocks.prefill):
        for side in (tiles.rows, tiles.keys):
            assert side >= 16
            assert side & (side - 1) == 0
        assert tiles.queries(group) >= 1
        assert blocks.least_split % tiles.keys == 0
    for tiles, buffers in ((blocks.decode, 2), (blocks.prefill, 2 if product_bytes == 4 else 3)):
        tile = width * max(product_bytes, stored_bytes)
        weights = tiles.rows * tiles.keys * product_bytes
        assert (tiles.rows + 2 * buffers * tiles.keys) * tile + weights < chip.shared_memory


def test_heads_too_large_for_a_chip_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"head_dim 256 with 128 query heads.*101376"):
        _blocks(L4, head_dim=256, group=128)


@pytest.mark.parametrize("kv_heads", [1, 3, 8, 32])
def test_there_is_work_for_every_program(kv_heads: int) -> None:
    blocks = _blocks(H100, head_dim=128, group=4)
    assert blocks.extra_splits(kv_heads) * kv_heads >= 2 * blocks.programs


def _blocks(
    chip: GpuChip, *, head_dim: int, group: int, product_bytes: int = 2, stored_bytes: int = 2
) -> GpuBlocks:
    return gpu_blocks(
        chip,
        head_dim=head_dim,
        group=group,
        product_bytes=product_bytes,
        stored_bytes=stored_bytes,
        one_path=False,
    )
