"""The engine's programs on a GPU: compiled for it where XLA's compiler is at hand, else only lowered."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest

from jkv.engine.programs import gather_name, scatter_name
from jkv.plan.targets import find_cuda
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
from tests.engine.plans import H100, PLANS

_LLAMA, _QWEN, _INT8, _EXPERTS, _MIXTRAL = (
    f"{name}, 2 layers{H100}"
    for name in ("llama3-8b", "qwen3-1.7b", "smollm2-int8-kv", "qwen3-30b-a3b", "mixtral-8x7b")
)


def in_full_runs(*names: str, programs: tuple[str, ...]) -> list[Any]:
    return [pytest.param(n + H100, p, marks=pytest.mark.full) for n in names for p in programs]


def _with_experts(case: Any) -> bool:
    return PLANS[getattr(case, "values", case)[0]].config.experts is not None


STEPS = [
    (_LLAMA, "step/1"),
    (_LLAMA, "step/64"),
    (_LLAMA, "step/512"),
    (_QWEN, "step/16"),
    (_INT8, "step/16"),
    (_EXPERTS, "step/16"),
    (_EXPERTS, "step/512"),
    *(pytest.param(_MIXTRAL, f"step/{tokens}", marks=pytest.mark.full) for tokens in (1, 64, 512)),
    *in_full_runs("llama3-8b", programs=tuple(f"step/{2**i}" for i in range(10))),
    *in_full_runs(
        "qwen3-1.7b",
        "smollm2",
        "smollm2-int8-kv",
        programs=("step/1", "step/16", "step/512"),
    ),
    *in_full_runs("llama3-8b-tp4", programs=("step/2", "step/16", "step/512")),
    *in_full_runs("qwen3-30b-a3b-tp4, 2 layers", programs=("step/2", "step/512")),
]
SAMPLING = [
    (_LLAMA, "admit"),
    (_LLAMA, "sample/16"),
    *in_full_runs("qwen3-1.7b", programs=("sample/2", "sample/16")),
    *in_full_runs("llama3-8b-tp4", programs=("sample/2", "sample/16")),
]
TRANSFERS = [
    (_LLAMA, 16),
    (_INT8, 4),
    *(
        pytest.param(plan + H100, count, marks=pytest.mark.full)
        for plan in ("llama3-8b", "smollm2", "smollm2-int8-kv", "llama3-8b-tp4")
        for count in (1, 16)
    ),
]
COMPILED = in_every_run(STEPS, SAMPLING, TRANSFERS)


@pytest.mark.parametrize(("plan", "program"), STEPS)
def test_a_step_writes_the_pool_in_place_and_makes_no_copy_of_it(
    needs: Compile, plan: str, program: str
) -> None:
    found = needs(plan, program)
    if found is not None:
        # Several rows of each token are on their way through its experts.
        most = 64 * MIB if PLANS[plan].config.experts is None else 128 * MIB
        check_step(plan, found, kernel="__gpu$xla.gpu.triton", temporaries=most)


@pytest.mark.parametrize(("plan", "program"), [case for case in STEPS if _with_experts(case)])
def test_experts_make_no_product_of_all_rows_with_all_of_them(
    needs: Compile, plan: str, program: str
) -> None:
    found = needs(plan, program)
    if found is not None:
        config, tokens = PLANS[plan].config, int(program.removeprefix("step/"))
        assert config.experts is not None
        assert found["temporaries"] < max(
            config.experts.count * tokens * config.intermediate_size * 2, 4 * MIB
        )


@pytest.mark.parametrize(("plan", "program"), SAMPLING)
def test_sampling_keeps_its_state_in_place(needs: Compile, plan: str, program: str) -> None:
    found = needs(plan, program)
    if found is not None:
        check_sampling(plan, found, temporaries=64 * MIB)


@pytest.mark.parametrize(("plan", "count"), TRANSFERS)
def test_pages_are_gathered_into_host_memory(needs: Compile, plan: str, count: int) -> None:
    found = needs(plan, gather_name(count))
    if found is not None:
        check_gather(plan, found, count)


@pytest.mark.parametrize(("plan", "count"), TRANSFERS)
def test_pages_are_scattered_into_the_pool_in_place(needs: Compile, plan: str, count: int) -> None:
    found = needs(plan, scatter_name(count))
    if found is not None:
        check_scatter(plan, found)


@pytest.mark.parametrize(("plan", "program"), [case for case in STEPS if "-tp4" in str(case)])
def test_devices_that_share_a_model_only_sum_over_each_other(needs: Compile, plan: str, program: str) -> None:
    """The embedding's rows, and two products of every layer."""
    found = needs(plan, program)
    if found is not None:
        sums = 1 + 2 * PLANS[plan].config.num_layers
        assert {name: found[name] for name in COLLECTIVES if found[name]} == {"all-reduce": sums}


@pytest.fixture(scope="module")
def needs(request: pytest.FixtureRequest) -> Compile:
    """What a program needs: alias and temporary bytes. None where it could only be lowered."""
    if find_cuda() is None:
        warnings.warn("no compiler for GPUs: programs are lowered for them, not compiled", stacklevel=1)
        return lambda plan, program: check_lowered(plan, program, "cuda")
    selected = [i.callspec.params for i in request.session.items if i.path == request.path]  # type: ignore[attr-defined]

    @cache
    def compiled(plan: str) -> dict[str, Needs]:
        mine = [p for p in selected if p["plan"] == plan]
        names = {p["program"] for p in mine if "program" in p}
        counts = {p["count"] for p in mine if "count" in p}
        target = "h100:4" if "-tp4" in plan else "h100:1"
        return compile_for(target, plan, names | {f(n) for f in (gather_name, scatter_name) for n in counts})

    return lambda plan, program: compiled(plan)[program]
