"""Making a plan: compiling the model's programs for the target, and computing from what they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jkv.config import GIB
from jkv.engine.l1_size import Budget, Memory, divide, l1_pages
from jkv.engine.planning import kv_dtype, max_model_len, plan_for, with_pages
from jkv.engine.programs import (
    ADMIT,
    Program,
    ProgramPlan,
    programs,
    scatter_name,
    step_name,
)
from jkv.engine.sizing import host_memory, largest_programs, staging_bytes, state_bytes
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
    chip, device = target.chip or this_machine(), chips[0]
    weights = _weights(options, small, chip, device)

    def compile_named(plan: ProgramPlan, names: Iterable[str]) -> list[Compiled]:
        return compile_all((p for p in programs(plan) if p.name in names), device, progress)

    sizing = compile_named(small, largest_programs(small))
    budget = divide(
        chip.memory_bytes - weights,
        state_bytes(small) + staging_bytes(small),
        [compiled.beside_arguments for compiled in sizing],
        sum(1 for _ in programs(small)),
    )
    on_device = Memory(available=budget.left, default=budget.left)
    memory = host_memory(serve, weights) if target.chip is None else on_device
    page = small.pool.device_page_bytes
    pages = l1_pages(serve, page, memory)
    plan = with_pages(small, pages)
    compiled = compile_named(plan, _told(plan))
    roofline = Roofline(
        work=work_of(
            widened(model, tp),
            plan.dtype,
            chips=tp,
            kv_bytes=page // serve.page_size,
            host_kv_bytes=plan.pool.host_page_bytes // tp // serve.page_size,
        ),
        chip=chip,
        flops=chip.float32_flops if plan.dtype == "float32" else chip.flops,
    )
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
            pages=pages,
            needed=_needed(compiled, weights, budget),
        ),
        most_pages=memory.available // page,
        page_bytes=plan.pool.host_page_bytes,
        estimate=estimate(
            roofline,
            max_model_len=max_model_len(serve, model),
            max_num_seqs=plan.max_num_seqs,
            max_batched_tokens=plan.max_batched_tokens,
            l1_tokens=pages * serve.page_size,
        ),
    )


def _weights(options: PlanOptions, plan: ProgramPlan, chip: Chip, device: Any) -> int:
    """Bytes of the weights on a chip, which must have room for more."""
    params = _step(plan).args[0]
    weights = unpadded_bytes(params)
    if weights < chip.memory_bytes:
        weights = weights_bytes(params, device)
    if weights >= chip.memory_bytes:
        raise ConfigError(
            f"--model {options.model}: its weights take {weights / GIB:.2f} GiB on a chip of --target "
            f"{options.target}, which has {chip.memory_bytes / GIB:.2f}: plan for more or larger chips"
        )
    return weights


def _step(plan: ProgramPlan) -> Program:
    return next(p for p in programs(plan) if p.name == step_name(plan.token_buckets[-1]))


def _told(plan: ProgramPlan) -> tuple[str, ...]:
    """One program of each kind, of the largest bucket, and the step of a full batch of decodes."""
    return (
        *largest_programs(plan),
        step_name(padded(plan.max_num_seqs)),
        scatter_name(plan.page_buckets[-1]),
        ADMIT,
    )


def _needed(compiled: Sequence[Compiled], weights: int, budget: Budget) -> int:
    pool = max(c.aliased for c in compiled)
    running = max(c.temporaries + c.outputs for c in compiled)
    return weights + pool + running + budget.buffers + budget.code
