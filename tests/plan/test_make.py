"""Plans as they are made: for this machine in the process, for a TPU as its user makes them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jkv.bench.calibrate import Calibration
from jkv.config import GIB
from jkv.engine import sizing
from jkv.errors import ConfigError
from jkv.plan import report, this_machine
from jkv.plan.make import Plan, make_plan
from jkv.plan.options import PlanOptions
from jkv.plan.targets import TARGETS, find_cuda, find_libtpu

_ROOT = Path(__file__).parents[2]
_CONFIGS = _ROOT / "tests" / "data" / "configs"
_SMALL = str(_CONFIGS / "small" / "config.json")
_FEW: dict[str, Any] = {"max_num_seqs": 2, "max_batched_tokens": 16}

needs_libtpu = pytest.mark.skipif(find_libtpu() is None, reason="libtpu is not installed")
needs_cuda = pytest.mark.skipif(find_cuda() is None, reason="jax's CUDA plugin is not installed")


@pytest.fixture(scope="module")
def machine() -> Iterator[None]:
    """A machine of known speed, with 8 GiB."""
    speeds = Calibration(matmul_gflops=100.0, matmul_vs_reference=1.0, memory_read_gb_per_s=10.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(this_machine, "calibrate", lambda: speeds)
        for module in (this_machine, sizing):
            patch.setattr(module, "host_available", lambda: 8 * GIB)
        yield


@pytest.fixture(scope="module")
def plan(machine: None) -> Plan:
    return make_plan(PlanOptions(model=_SMALL, **_FEW), lambda compiled: None)


def test_a_plan_for_this_machine_gives_l1_what_its_server_would(plan: Plan) -> None:
    page = 2 * 2 * 4 * 64 * 64 * 4
    assert (plan.memory.page, plan.page_bytes) == (page, page)
    assert plan.memory.pages == GIB // page
    assert plan.l1_tokens == 64 * plan.memory.pages
    # Beside the default --l2-gib and the weights.
    assert plan.most_pages == (6 * GIB - plan.memory.weights) // page
    assert plan.memory.weights == 4 * plan.parameters
    assert {c.program for c in plan.compiled} == {
        "admit", "gather/16", "scatter/16", "sample/2", "step/2", "step/16"
    }  # fmt: skip
    assert plan.estimate.restore_s == pytest.approx(1000 * page / 64 / 5e9)
    assert plan.memory.fits


@pytest.mark.usefixtures("machine")
def test_a_model_that_leaves_no_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "host_available", lambda: 2**20)
    with pytest.raises(ConfigError, match=r"^--model .*: its weights take .* GiB on a chip of --target cpu"):
        make_plan(PlanOptions(model=_SMALL, **_FEW), lambda compiled: None)


@pytest.mark.usefixtures("machine")
def test_more_chips_than_the_target_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--tp 2: needs as many devices, and there are 1"):
        make_plan(PlanOptions(model=_SMALL, tp=2, **_FEW), lambda compiled: None)


def test_the_table_says_what_the_plan_is(plan: Plan) -> None:
    text = report.as_text(plan)
    assert "small: LlamaForCausalLM, 0.00 billion parameters in float32, KV cache in float32" in text
    assert f"L1: {plan.memory.pages:,} pages of 64 tokens" in text
    assert f"--l1-pages could be {plan.most_pages:,}" in text
    assert "fits: " in text
    assert json.loads(report.as_json(plan))["memory"]["l1"] == plan.memory.l1


def test_a_plan_that_the_compiler_contradicts_says_so(plan: Plan) -> None:
    memory = dataclasses.replace(plan.memory, needed=plan.memory.total + 1)
    text = report.as_text(dataclasses.replace(plan, memory=memory))
    assert "DOES NOT FIT: the programs compiled with this L1 need 8.000 GiB of 8.000" in text


_STEPS = ("--max-num-seqs", "2", "--max-batched-tokens", "16")


@pytest.mark.parametrize(
    ("target", "model", "flags", "tp"),
    [
        pytest.param("tpu-v6e:2x2", "small", ("--tp", "1", *_STEPS), 1, marks=needs_libtpu),
        pytest.param("tpu-v6e:2x2", "qwen3-1.7b", (), 4, marks=[needs_libtpu, pytest.mark.full]),
        pytest.param("tpu-v5e:2x2", "llama-3-8b", ("--tp", "1"), 1, marks=[needs_libtpu, pytest.mark.full]),
        pytest.param("h100:1", "small", _STEPS, 1, marks=needs_cuda),
        pytest.param("h100:4", "llama-3-8b", (), 4, marks=[needs_cuda, pytest.mark.full]),
    ],
)
def test_a_plan_for_a_chip_adds_up_to_its_memory(
    target: str, model: str, flags: tuple[str, ...], tp: int
) -> None:
    chip = TARGETS[target].chip
    assert chip is not None
    plan = _plan("--model", str(_CONFIGS / model), "--target", target, *flags)
    found, budget = plan["memory"], plan["memory"]["budget"]
    assert plan["tp"] == tp
    config = json.loads((_CONFIGS / model / "config.json").read_text())
    # Only sampling reads a head of its own.
    head = 0 if config["tie_word_embeddings"] else 2 * config["vocab_size"] * config["hidden_size"] // tp
    if tp == 1:
        assert found["weights"] == 2 * plan["parameters"]
        assert plan["page_bytes"] == found["page"]
    steps = [c for c in plan["compiled"] if c["program"].startswith("step/")]
    assert len(steps) == 2
    for step in steps:
        # The program of the L1 that was planned: its pool is updated in place, beside the weights.
        assert step["aliased"] == found["l1"] == found["pages"] * found["page"]
        assert 0 <= step["arguments"] - (found["weights"] - head) - found["l1"] < 2**20
        assert step["arguments"] + step["temporaries"] + step["outputs"] + step["code"] < chip.memory_bytes
    parts = ("buffers", "running", "code", "reserve")
    used = found["weights"] + found["l1"] + sum(budget[part] for part in parts)
    assert chip.memory_bytes - found["page"] < used <= chip.memory_bytes
    assert found["fits"]
    assert found["needed"] <= chip.memory_bytes


def _plan(*argv: str) -> dict[str, Any]:
    found = _run(*argv, "--json")
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def _run(*argv: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, for libtpu reads its environment when jax starts."""
    return subprocess.run(
        [sys.executable, "-m", "jkv.plan", *argv],
        cwd=_ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
