from __future__ import annotations

import json

import pytest

from jkv.bench.__main__ import main
from jkv.bench.attention_timing import variants
from jkv.kernels import cpu_library
from jkv.kernels.gpu_blocks import GpuBlocks, Tiles
from jkv.kernels.tpu_blocks import BlockSize, TpuBlocks
from jkv.kernels.xla_attention import AttentionBlocks

_SMALL = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--page-size", "16", "--kv-dtype", "float32"]
_LOAD = ["--contexts", "64,32", "--seqs", "3", "--chunk", "8", "--window", "40"]


def test_counts_the_bytes_and_products_of_what_it_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attention", *_SMALL, *_LOAD, "--json"]) == 0
    decode, prefill, windowed, chunk = json.loads(capsys.readouterr().out)["results"]
    assert [decode["context"], prefill["context"]] == [32, 32]
    assert [windowed["kind"], chunk["kind"]] == ["decode", "prefill"]
    token, pair = 2 * 2 * 16 * 4, 4 * 4 * 16
    assert decode["kv_bytes"] == 3 * 32 * token
    assert decode["flops"] == 3 * 32 * pair
    assert prefill["kv_bytes"] == 32 * token
    assert prefill["flops"] == sum(range(25, 33)) * pair
    assert windowed["kv_bytes"] == 3 * 40 * token
    assert chunk["kv_bytes"] == (40 + 7) * token
    assert chunk["flops"] == 8 * 40 * pair
    for timing in (decode, prefill, windowed, chunk):
        assert timing["seconds"] > 0
        assert timing["copy_bytes_per_s"] > 0
        assert not timing["tuned"]
    assert decode["blocks"] == ("" if cpu_library.available() else "decode_keys=128")


@pytest.mark.skipif(not cpu_library.available(), reason="no C++ compiler")
def test_refuses_to_tune_what_is_fixed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attention", *_SMALL, *_LOAD, "--tune"]) == 2
    assert "--tune: the kernel of CPUs has fixed block sizes" in capsys.readouterr().err


def test_tuning_tries_sizes_that_the_kernels_can_have() -> None:
    tpu = TpuBlocks(
        decode=BlockSize(queries=8, keys=256, copied=512),
        prefill=BlockSize(queries=64, keys=512, copied=512),
        vmem_limit=2**24,
    )
    decodes = list(variants(tpu, "decode", 256))
    assert tpu in decodes
    assert {b.decode.keys for b in decodes} == {256, 512}
    assert all(b.decode.copied % b.decode.keys == 0 and b.prefill == tpu.prefill for b in decodes)
    assert {b.prefill.queries for b in variants(tpu, "prefill", 64)} == {32, 64, 128}
    tiles = Tiles(rows=16, keys=64, warps=4, stages=3)
    gpu = GpuBlocks(decode=tiles, prefill=tiles, programs=4, least_split=64, one_path=False)
    assert {b.decode.rows for b in variants(gpu, "decode", 64)} == {16}
    assert {(b.prefill.rows, b.decode.keys) for b in variants(gpu, "prefill", 64)} == {(16, 64), (32, 64)}
    xla = AttentionBlocks()
    assert {b.decode_keys for b in variants(xla, "decode", 64)} == {64, 128, 256}
    assert xla in list(variants(xla, "prefill", 64))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--heads", "5", "--kv-heads", "2"], "--kv-heads 2: must divide --heads 5"),
        (["--contexts", "64", "--chunk", "65"], "--contexts 64: must all be --chunk 65 or more"),
        (["--contexts", "64,x"], "--contexts 64,x: 'x' is not a length"),
    ],
)
def test_refuses_by_name(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attention", *flags]) == 2
    assert named in capsys.readouterr().err
