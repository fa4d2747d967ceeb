"""Compiles programs of `tests.engine.plans.PLANS` for a target that need not be there, and prints what each
needs as a JSON line: `python -m tests.engine.compile_for TARGET PLAN PROGRAM ...`.

A process of its own, for the compilers read their environment when jax starts.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jkv.engine.programs import Program, ProgramPlan, gather_name, programs, scatter_name
from jkv.kernels.mesh import TP
from jkv.plan.compiling import build, devices, measured
from jkv.plan.targets import TARGETS
from tests.compiler_process import run_module
from tests.engine.plans import PLANS, over

MIB = 2**20
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")

# The fields of jkv.plan.compiling.Compiled, and how many of each collective and custom call.
Needs = dict[str, Any]
# A program's needs by its plan and name; None where it could only be lowered.
Compile = Callable[[str, str], Needs | None]


def in_every_run(steps: Iterable[Any], sampling: Iterable[Any], transfers: Iterable[Any]) -> frozenset[str]:
    """Names of the programs whose cases are not only of full runs; a transfer goes both ways."""
    usual = {case[1] for case in (*steps, *sampling) if type(case) is tuple}
    counts = {case[1] for case in transfers if type(case) is tuple}
    return frozenset(usual | {name(count) for count in counts for name in (gather_name, scatter_name)})


def compile_for(target: str, plan: str, names: Iterable[str]) -> dict[str, Needs]:
    """Compiles in a process of its own; the programs' needs by name."""
    output = run_module(["tests.engine.compile_for", target, plan, *names], TARGETS[target].environment())
    return {line["program"]: line for line in map(json.loads, output.splitlines())}


def check_lowered(plan: str, name: str, platform: str) -> None:
    """What shows without a compiler: the program lowers, and updates what is donated in place."""
    program = next(p for p in programs(PLANS[plan]) if p.name == name)
    text = program.jitted().trace(*program.args).lower(lowering_platforms=(platform,)).as_text()
    donated = jax.tree.leaves([program.args[i] for i in program.donated])
    assert text.count("tf.aliasing_output") == len(donated)


def check_step(plan: str, found: Needs, *, kernel: str, temporaries: int) -> None:
    """It writes the pool in place, makes no copy of it, and attends by the kernel."""
    pool = PLANS[plan].pool
    size = pool.pages * pool.device_page_bytes
    assert found["aliased"] == size
    assert found["temporaries"] < min(temporaries, size // 16)
    assert kernel in found["custom_calls"]


def check_sampling(plan: str, found: Needs, *, temporaries: int) -> None:
    """It keeps its state in place."""
    state = 16 * PLANS[plan].config.vocab_size * (4 + 1 + 4)
    assert state <= found["aliased"] < 1.01 * state
    assert found["temporaries"] < temporaries


def check_gather(plan: str, found: Needs, count: int) -> None:
    """The pages go into the host's memory."""
    pool = PLANS[plan].pool
    moved = count * pool.page_bytes // pool.tp
    assert moved <= found["host_outputs"] < 1.01 * moved
    assert found["outputs"] < 2**16  # the table of outputs
    assert found["temporaries"] < 2 * moved


def check_scatter(plan: str, found: Needs) -> None:
    """The pages go into the pool in place."""
    pool = PLANS[plan].pool
    assert found["aliased"] == pool.pages * pool.device_page_bytes
    assert found["temporaries"] < 4 * MIB


def main(target: str, plan: str, *names: str) -> None:
    chips = devices(TARGETS[target])
    wanted = [p for p in programs(_over(PLANS[plan], chips)) if p.name in names]
    with ThreadPoolExecutor(2) as pool:
        for line in pool.map(lambda p: json.dumps(_needs(p, chips[0])), wanted):
            print(line, flush=True)


def _over(plan: ProgramPlan, chips: Any) -> ProgramPlan:
    return plan if plan.mesh is None else over(plan, Mesh(np.asarray(chips[: plan.pool.tp]), (TP,)))


def _needs(program: Program, chip: Any) -> Needs:
    started = time.monotonic()
    compiled = build(program, chip)
    text = compiled.as_text()
    assert text is not None
    return {
        **asdict(measured(program.name, compiled, time.monotonic() - started)),
        **{name: len(re.findall(rf" {name}(-start)?\(", text)) for name in COLLECTIVES},
        "custom_calls": sorted(set(re.findall(r'custom_call_target="([^"]+)"', text))),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
