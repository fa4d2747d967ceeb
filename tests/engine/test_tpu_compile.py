"""The engine's programs on a TPU: compiled for the chip where libtpu is at hand, else only lowered."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from jkv.engine.programs import gather_name, scatter_name
from jkv.plan.targets import find_libtpu
from tests.engine.compile_for import (
    COLLECTIVES,
    MIB,
    Compile,
    Needs,
    check_gather,
    check_lowered,
    check_sampling,
    check_scatter,
    check_step,
    compile_for,
    in_every_run,
)
from tests.engine.plans import V5E

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
    pytest.param("llama3-8b", "step/512", marks=pytest.mark.full),
    *(pytest.param("qwen3-30b-a3b, 2 layers", f"step/{n}", marks=pytest.mark.full) for n in (1, 16)),
    *(
        pytest.param(plan, f"step/{2**i}", marks=pytest.mark.full)
        for plan, usual in (("llama3-8b-tp4", 4), ("qwen3-1.7b-tp4", 6))
        for i in range(1, 10)
        if i != usual
    ),
    *(pytest.param("llama3-8b-tp4" + V5E, f"step/{n}", marks=pytest.mark.full) for n in (16, 512)),
]
SAMPLING = [
    ("smollm2", "admit"),
    ("smollm2", "sample/16"),
    pytest.param("llama3-8b", "sample/16", marks=pytest.mark.full),
    pytest.param("llama3-8b-tp4", "sample/16", marks=pytest.mark.full),
    pytest.param("llama3-8b-tp4" + V5E, "sample/16", marks=pytest.mark.full),
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

ONLY_FULL_TRANSFERS = [("llama3-8b-tp4" + V5E, 16)]

COMPILED = in_every_run(STEPS, SAMPLING, TRANSFERS)


def moves(*names: Callable[[int], str]) -> list[Any]:
    """A case for each transfer and each of these programs."""
    usual = [(plan, name(count)) for plan, count in TRANSFERS for name in names]
    rest = [
        pytest.param(plan, name(count), marks=pytest.mark.full)
        for plan, count in ONLY_FULL_TRANSFERS
        for name in names
    ]
    return usual + rest


@pytest.mark.parametrize(("plan", "program"), STEPS)
def test_a_step_writes_the_pool_in_place_and_makes_no_copy_of_it(
    needs: Compile, plan: str, program: str
) -> None:
    found = needs(plan, program)
    if found is not None:
        check_step(plan, found, kernel="tpu_custom_call", temporaries=32 * MIB)


@pytest.mark.parametrize(("plan", "program"), SAMPLING)
def test_sampling_keeps_its_state_in_place(needs: Compile, plan: str, program: str) -> None:
    found = needs(plan, program)
    if found is not None:
        check_sampling(plan, found, temporaries=32 * MIB)


@pytest.mark.parametrize(("plan", "program"), moves(gather_name))
def test_pages_are_gathered_into_host_memory(needs: Compile, plan: str, program: str) -> None:
    found = needs(plan, program)
    if found is not None:
        check_gather(plan, found, int(program.split("/")[1]))


@pytest.mark.parametrize(("plan", "program"), moves(scatter_name))
def test_pages_are_scattered_into_the_pool_in_place(needs: Compile, plan: str, program: str) -> None:
    found = needs(plan, program)
    if found is not None:
        check_scatter(plan, found)


@pytest.mark.parametrize(("plan", "program"), [case for case in STEPS if "-tp4" in str(case)])
def test_devices_that_share_a_model_only_sum_over_each_other(needs: Compile, plan: str, program: str) -> None:
    """The embedding's rows, and under scan one layer's two products."""
    found = needs(plan, program)
    if found is not None:
        assert {name: found[name] for name in COLLECTIVES if found[name]} == {"all-reduce": 3}


@pytest.mark.parametrize(
    ("plan", "program"),
    [case for case in moves(gather_name, scatter_name) if "-tp4" in str(case)],
)
def test_devices_that_share_a_model_move_pages_on_their_own(needs: Compile, plan: str, program: str) -> None:
    found = needs(plan, program)
    if found is not None:
        assert not any(found[name] for name in COLLECTIVES)


@pytest.fixture(scope="module")
def needs(request: pytest.FixtureRequest) -> Compile:
    """What a program needs: alias and temporary bytes. None where it could only be lowered."""
    if find_libtpu() is None:
        warnings.warn("libtpu is not installed: programs are lowered for TPU, not compiled", stacklevel=1)
        return lambda plan, program: check_lowered(plan, program, "tpu")
    selected = [i.callspec.params for i in request.session.items if i.path == request.path]  # type: ignore[attr-defined]

    @cache
    def compiled(plan: str) -> dict[str, Needs]:
        names = [p["program"] for p in selected if p["plan"] == plan]
        return compile_for(_target(plan), plan, names)

    return lambda plan, program: compiled(plan)[program]


def _target(plan: str) -> str:
    return "tpu-v5e:2x2" if plan.endswith(V5E) else "tpu-v6e:2x2"
