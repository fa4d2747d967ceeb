from __future__ import annotations

import json

import pytest

from jkv.bench.__main__ import main
from jkv.bench.attention import AttentionOptions
from jkv.bench.device_kernels import measure


def test_what_runs_on_the_device() -> None:
    options = AttentionOptions(
        heads=4, kv_heads=2, head_dim=16, contexts="64", seqs=2, chunk=32, page_size=16
    )
    found = measure(options, layers=2)
    assert found["kernel"] == "triton"
    assert 0 < found["largest_error"] < 1e-5
    assert (found["decode"].kind, found["prefill"].kind) == ("decode", "prefill")
    assert found["decode"].seconds > 0
    assert found["copies"].to_device > 0
    assert found["copies"].to_host > 0


@pytest.mark.full
def test_a_check_at_toy_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["device_check", "--shape", "toy", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    (length,) = results["tiers"]["lengths"]
    assert set(length["ttft"]) == {"cold", "l1", "l2", "l3", "restart"}
    assert results["tiers"]["speeds"]["l2_load"] > 0
