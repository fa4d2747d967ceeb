"""The engine's programs on a TPU: compiled for the chip where libtpu is at hand, else only lowered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

from jkv.engine.programs import gather_name, programs, scatter_name
from tests.engine.compile_for_tpu import COLLECTIVES, ENVIRONMENT
from tests.engine.plans import TPU_PLANS

_ROOT = Path(__file__).parents[2]
_MIB = 2**20

STEPS = [
    ("smollm2", "step/1"),
    ("smollm2", "step/16"),
    ("smollm2", "step/512"),
    ("smollm2-float32-kv", "step/16"),
    ("smollm2-int8-kv", "step/1"),
    ("smollm2-int8-kv", "step/512"),
    ("llama3-8b-int8-kv", "step/16"),
    ("llama3-8b", "step/1"),
    ("llama3-8b", "step/64"),
    ("llama3-8b-tp4", "step/16"),
    ("qwen3-1.7b-tp4", "step/64"),
    pytest.param("llama3-8b-tp4", "step/1", marks=pytest.mark.full),
    pytest.param("llama3-8b-tp4", "step/512", marks=pytest.mark.full),
    pytest.param("qwen3-1.7b-tp4", "step/512", marks=pytest.mark.full),
    pytest.param("llama3-8b", "step/512", marks=pytest.mark.full),
]
SAMPLING = [
    ("smollm2", "admit"),
    ("smollm2", "sample/16"),
    pytest.param("llama3-8b", "sample/16", marks=pytest.mark.full),
    pytest.param("llama3-8b-tp4", "sample/16", marks=pytest.mark.full),
]
TRANSFERS = [
    ("smollm2", 1),
    ("smollm2", 16),
    ("smollm2-float32-kv", 4),
    ("smollm2-int8-kv", 16),
    ("llama3-8b-int8-kv", 1),
    ("llama3-8b", 16),
    ("llama3-8b-tp4", 16),
    ("qwen3-1.7b-tp4", 4),
]

# The programs that are compiled in every run, not only in a full one.
COMPILED = {
    *(case[1] for case in (*STEPS, *SAMPLING) if type(case) is tuple),
    *(name(count) for _, count in TRANSFERS for name in (gather_name, scatter_name)),
}

Needs = Callable[[str, str], dict[str, int] | None]


@pytest.mark.parametrize(("plan", "program"), STEPS)
def test_a_step_writes_the_pool_in_place_and_makes_no_copy_of_it(
    needs: Needs, plan: str, program: str
) -> None:
    pool = TPU_PLANS[plan].pool
    found = needs(plan, program)
    if found is not None:
        size = pool.pages * pool.device_page_bytes
        assert found["alias"] == size
        assert found["temporaries"] < min(32 * _MIB, size // 16)


@pytest.mark.parametrize(("plan", "program"), SAMPLING)
def test_sampling_keeps_its_state_in_place(needs: Needs, plan: str, program: str) -> None:
    state = 16 * TPU_PLANS[plan].config.vocab_size * (4 + 1 + 4)
    found = needs(plan, program)
    if found is not None:
        assert state <= found["alias"] < 1.01 * state
        assert found["temporaries"] < 32 * _MIB


@pytest.mark.parametrize(("plan", "program"), [(plan, gather_name(n)) for plan, n in TRANSFERS])
def test_pages_are_gathered_into_host_memory(needs: Needs, plan: str, program: str) -> None:
    pool = TPU_PLANS[plan].pool
    moved = int(program.split("/")[1]) * pool.page_bytes // pool.tp
    found = needs(plan, program)
    if found is not None:
        assert moved <= found["host_outputs"] < 1.01 * moved
        assert found["outputs"] < 2**16  # the table of outputs
        assert found["temporaries"] < 2 * moved


@pytest.mark.parametrize(("plan", "program"), [(plan, scatter_name(n)) for plan, n in TRANSFERS])
def test_pages_are_scattered_into_the_pool_in_place(needs: Needs, plan: str, program: str) -> None:
    pool = TPU_PLANS[plan].pool
    found = needs(plan, program)
    if found is not None:
        assert found["alias"] == pool.pages * pool.device_page_bytes
        assert found["temporaries"] < 4 * _MIB


@pytest.mark.parametrize(("plan", "program"), [case for case in STEPS if "-tp4" in str(case)])
def test_devices_that_share_a_model_only_sum_over_each_other(needs: Needs, plan: str, program: str) -> None:
    """The embedding's rows, and under scan one layer's two products."""
    found = needs(plan, program)
    if found is not None:
        assert {name: found[name] for name in COLLECTIVES if found[name]} == {"all-reduce": 3}


@pytest.mark.parametrize(
    ("plan", "program"),
    [(plan, name(n)) for plan, n in TRANSFERS if "-tp4" in plan for name in (gather_name, scatter_name)],
)
def test_devices_that_share_a_model_move_pages_on_their_own(needs: Needs, plan: str, program: str) -> None:
    found = needs(plan, program)
    if found is not None:
        assert not any(found[name] for name in COLLECTIVES)


@pytest.fixture(scope="module")
def needs(request: pytest.FixtureRequest) -> Needs:
    """What a program needs: alias and temporary bytes. None where it could only be lowered."""
    library = _libtpu()
    if library is None:
        warnings.warn("libtpu is not installed: programs are lowered for TPU, not compiled", stacklevel=1)
        return _check_lowered
    selected = [i.callspec.params for i in request.session.items if i.path == request.path]  # type: ignore[attr-defined]

    @cache
    def compiled(plan: str) -> dict[str, dict[str, int]]:
        names = [p["program"] for p in selected if p["plan"] == plan]
        return _compile(library, plan, names)

    return lambda plan, program: compiled(plan)[program]


def _libtpu() -> Path | None:
    """The one that `scripts/test` puts beside the packages, where nothing else sees it, or a package's."""
    beside = sorted(Path(sys.prefix).glob("libtpu-*/libtpu/libtpu.so"))
    if beside:
        return beside[-1]
    spec = find_spec("libtpu")
    return Path(spec.origin).with_name("libtpu.so") if spec is not None and spec.origin else None


def _compile(library: Path, plan: str, names: list[str]) -> dict[str, dict[str, int]]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.engine.compile_for_tpu", plan, *names],
        cwd=_ROOT,
        env=os.environ | ENVIRONMENT | {"TPU_LIBRARY_PATH": str(library)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr
    return {line.pop("program"): line for line in map(json.loads, run.stdout.splitlines())}


def _check_lowered(plan: str, name: str) -> None:
    program = next(p for p in programs(TPU_PLANS[plan]) if p.name == name)
    text = program.jitted().trace(*program.args).lower(lowering_platforms=("tpu",)).as_text()
    donated = jax.tree.leaves([program.args[i] for i in program.donated])
    assert text.count("tf.aliasing_output") == len(donated)
