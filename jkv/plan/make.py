"""Making a plan: compiling the model's programs for the target, and computing from what they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jkv.config import GIB
from jkv.engine.l1_size import Budget, divide, l1_pages
from jkv.engine.planning import kv_dtype, max_model_len, plan_for, with_pages
from jkv.engine.programs import (
    ADMIT,
    ProgramPlan,
    gather_name,
    programs,
    sample_name,
    scatter_name,
    step_name,
)
from jkv.engine.sizing import for_l1, host_memory, largest_programs, staging_bytes, state_bytes
from jkv.errors import ConfigError
from jkv.models.resolve import model_config
from jkv.models.sharding import possible_tp, widened
from jkv.plan.chips import Chip
from jkv.plan.compiling import Compiled, compile_all, devices, unpadded_bytes, weights_bytes
from jkv.plan.estimate import Estimate, estimate
from jkv.plan.memory import ChipMemory
from jkv.plan.options import PlanOptions
from jkv.plan.roofline import Roofline, padded
from jkv.plan.this_machine import this_machine
from jkv.plan.work import parameters, work_of


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `python -m jkv.plan` tells, in bytes and seconds. `page_bytes` is what moves between the host and
    the chips for a page, `most_pages` how many L1 could have at most if asked.
    """

    model: str
    architecture: str
    parameters: int
    dtype: str
    kv_dtype: str
    page_size: int
    target: str
    chip: Chip
    chips: int
    tp: int
    attention: str
    compiled: Sequence[Compiled]
    memory: ChipMemory
    most_pages: int
    page_bytes: int
    estimate: Estimate

    @property
    def l1_tokens(self) -> int:
        return self.memory.pages * self.page_size


def make_plan(options: PlanOptions, progress: Callable[[Compiled], None]) -> Plan:
    """Compiles and computes; jax has started with the target's environment.

    Raises:
        ConfigError: a flag that does not fit the model or the target.
        UnsupportedModelError: a model that jkv does not implement.
        JkvError: the target's compiler refuses a program.
    """
    target = options.machine
    name, model = model_config(options.model)
    tp = options.tp or max(n for n in possible_tp(model) if n <= target.chips)
    serve, chips = options.serve(tp), devices(target)
    small = plan_for(serve, model, target.platform, chips)
    chip = target.chip or this_machine()

    def compile_named(plan: ProgramPlan, names: Iterable[str]) -> list[Compiled]:
        return compile_all((p for p in programs(plan) if p.name in names), chips[0], progress)

    weights = _weights(options, small, chip, chips[0])
    sizing = compile_named(small, largest_programs(small))
    budget = _budget(small, chip.memory_bytes - weights, sizing)
    memory = host_memory(serve, weights) if target.chip is None else for_l1(small, budget.left)
    page = small.pool.device_page_bytes
    plan = with_pages(small, l1_pages(serve, page, memory))
    # Sampling does not touch the pool, and stays as it was.
    sampling = [c for c in sizing if c.program == sample_name(plan.sample_buckets[-1])]
    compiled = [*sampling, *compile_named(plan, _with_pool(plan))]
    return Plan(
        model=name,
        architecture=model.architecture,
        parameters=parameters(model, plan.dtype),
        dtype=str(plan.dtype),
        kv_dtype=kv_dtype(serve, target.platform),
        page_size=serve.page_size,
        target=target.name,
        chip=chip,
        chips=target.chips,
        tp=tp,
        attention=plan.attention.kernel,
        compiled=compiled,
        memory=ChipMemory(
            total=chip.memory_bytes,
            weights=weights,
            budget=budget,
            page=page,
            pages=plan.pool.pages,
            needed=_needed(compiled, weights, budget),
        ),
        most_pages=memory.available // page,
        page_bytes=plan.pool.host_page_bytes,
        estimate=_estimate(plan, chip, max_model_len(serve, model)),
    )


def _weights(options: PlanOptions, plan: ProgramPlan, chip: Chip, device: Any) -> int:
    """Bytes of the weights on a chip, which must have room for more."""
    params = next(p for p in programs(plan) if p.name == step_name(plan.token_buckets[-1])).args[0]
    weights = unpadded_bytes(params)
    if weights < chip.memory_bytes:
        weights = weights_bytes(params, device)
    if weights >= chip.memory_bytes:
        raise ConfigError(
            f"--model {options.model}: its weights take {weights / GIB:.2f} GiB on a chip of --target "
            f"{options.target}, which has {chip.memory_bytes / GIB:.2f}: plan for more or larger chips"
        )
    return weights


def _budget(plan: ProgramPlan, free: int, largest: Sequence[Compiled]) -> Budget:
    """As `jkv.engine.sizing.device_memory` divides what a device tells to be free."""
    return divide(
        free,
        state_bytes(plan) + staging_bytes(plan),
        [compiled.beside_arguments for compiled in largest],
        sum(1 for _ in programs(plan)),
    )


def _with_pool(plan: ProgramPlan) -> tuple[str, ...]:
    """A program of each kind but sampling, of the largest bucket, and the step of a full batch of decodes."""
    pages = plan.page_buckets[-1]
    return (
        ADMIT,
        gather_name(pages),
        scatter_name(pages),
        step_name(padded(plan.max_num_seqs)),
        step_name(plan.token_buckets[-1]),
    )


def _needed(compiled: Sequence[Compiled], weights: int, budget: Budget) -> int:
    pool = max(c.aliased for c in compiled)
    running = max(c.temporaries + c.outputs for c in compiled)
    return weights + pool + running + budget.buffers + budget.code


def _estimate(plan: ProgramPlan, chip: Chip, longest: int) -> Estimate:
    pool = plan.pool
    work = work_of(
        widened(plan.config, pool.tp),
        plan.dtype,
        chips=pool.tp,
        kv_bytes=pool.device_page_bytes // pool.page_size,
        host_kv_bytes=pool.host_page_bytes // pool.tp // pool.page_size,
    )
    flops = chip.float32_flops if plan.dtype == "float32" else chip.flops
    return estimate(
        Roofline(work=work, chip=chip, flops=flops),
        max_model_len=longest,
        max_num_seqs=plan.max_num_seqs,
        max_batched_tokens=plan.max_batched_tokens,
        l1_tokens=pool.pages * pool.page_size,
    )
