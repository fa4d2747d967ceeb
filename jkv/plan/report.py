"""A plan as tables for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

from jkv.config import GIB
from jkv.plan.estimate import RESTORED, Decode
from jkv.plan.make import Plan
from jkv.terminal import aligned

Row = Sequence[str]
_MIB = 2**20


def as_json(plan: Plan) -> str:
    """One object: bytes, seconds, tokens."""
    document = dataclasses.asdict(plan)
    document["memory"] |= {"l1": plan.memory.l1, "fits": plan.memory.fits}
    document["l1_tokens"] = plan.l1_tokens
    return json.dumps(document, indent=2, allow_nan=False)


def as_text(plan: Plan) -> str:
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    yield (
        f"{plan.model}: {plan.architecture}, {plan.parameters / 1e9:.2f} billion parameters in {plan.dtype}, "
        f"KV cache in {plan.kv_dtype}"
    )
    yield f"on {plan.tp} of {plan.chips} x {plan.chip.name}; attention: {plan.attention}"
    yield ""
    yield from aligned(
        [("compiled", "seconds", "temporaries MiB", "outputs MiB", "code MiB"), *_programs(plan)]
    )
    yield ""
    yield from aligned([("memory of a chip", "GiB"), *_memory(plan)])
    yield _verdict(plan)
    yield ""
    yield (
        f"L1: {plan.memory.pages:,} pages of {plan.page_size} tokens, {plan.l1_tokens:,} tokens, "
        f"{plan.memory.l1 / GIB:.2f} GiB a chip{_more(plan)}"
    )
    yield f"a page is {plan.page_bytes:,} bytes between the host and the chips"
    yield ""
    yield "at best, by the chip's peak arithmetic and bandwidths:"
    yield from aligned([("prefill, prompt tokens", "tokens/s"), *_prefill(plan)])
    yield from aligned(_decode(plan.estimate.decode))
    yield (
        f"{RESTORED:,} tokens brought from L2: {plan.estimate.restore_s * 1000:.2f} ms; "
        f"computed: {plan.estimate.compute_s * 1000:.2f} ms"
    )
    yield f"chip: {_chip(plan)}"


def _programs(plan: Plan) -> Iterator[Row]:
    for c in plan.compiled:
        sizes = (c.temporaries, c.outputs, c.code)
        yield (c.program, f"{c.seconds:.1f}", *(f"{size / _MIB:.1f}" for size in sizes))


def _memory(plan: Plan) -> Iterator[Row]:
    memory, budget = plan.memory, plan.memory.budget
    parts = {
        "weights": memory.weights,
        "sampler, pages on their way": budget.buffers,
        "a program's temporaries and outputs": budget.running,
        "programs' code": budget.code,
        "reserve": budget.reserve,
        "L1": memory.l1,
        "in all": memory.total,
    }
    return ((name, f"{size / GIB:.3f}") for name, size in parts.items())


def _verdict(plan: Plan) -> str:
    memory = plan.memory
    needed, total = f"{memory.needed / GIB:.3f}", f"{memory.total / GIB:.3f}"
    if memory.fits:
        return f"fits: the programs compiled with this L1 need {needed} GiB of {total}"
    return f"DOES NOT FIT: the programs compiled with this L1 need {needed} GiB of {total}"


def _more(plan: Plan) -> str:
    most = plan.most_pages
    return "" if most == plan.memory.pages else f"; --l1-pages could be {most:,}"


def _prefill(plan: Plan) -> Iterator[Row]:
    return ((f"{p.prompt_tokens:,}", f"{p.tokens_per_s:,.0f}") for p in plan.estimate.prefill)


def _decode(points: Sequence[Decode]) -> list[Row]:
    """Batches down, contexts across."""
    contexts = sorted({p.context_tokens for p in points})
    rows: list[Row] = [("decode tokens/s, context", *(f"{n:,}" for n in contexts))]
    for batch in sorted({p.batch for p in points}):
        speeds = {p.context_tokens: p.tokens_per_s for p in points if p.batch == batch}
        cells = ("-" if (s := speeds[n]) is None else f"{s:,.0f}" for n in contexts)
        rows.append((f"batch {batch}", *cells))
    return rows


def _chip(plan: Plan) -> str:
    chip = plan.chip
    return (
        f"{chip.flops / 1e12:,.3g} TFLOP/s, memory {chip.memory_bytes_per_s / 1e9:,.0f} GB/s, host link "
        f"{chip.host_bytes_per_s / 1e9:.3g} GB/s ({chip.sources})"
    )
