"""An engine on CPU that attends with a TPU's kernel, interpreted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jkv.engine.programs import ProgramPlan
from jkv.kernels.attention import AttentionSpec
from jkv.kernels.tpu_blocks import BlockSize, TpuBlocks
from tests.engine.harness import Bench, build, request, tiny_checkpoint
from tests.engine.oracle import check_hit, tiny_case

_BLOCKS = TpuBlocks(
    decode=BlockSize(queries=8, keys=32, copied=64),
    prefill=BlockSize(queries=16, keys=32, copied=64),
    vmem_limit=2**24,
)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        spec = AttentionSpec(kernel="mosaic", blocks=_BLOCKS, interpret=True)
        patch.setattr(ProgramPlan, "attention", property(lambda plan: spec))
        patch.setattr("jkv.engine.planning.has_panels", lambda *_: False)
        # Two programs, and one kernel in each for all layers: interpreted ones take long to compile.
        patch.setattr(ProgramPlan, "token_buckets", property(lambda plan: (1, plan.max_batched_tokens)))
        patch.setattr(ProgramPlan, "unroll_layers", property(lambda plan: False))
        bench = build(
            tiny_checkpoint("llama3"),
            page_size=16,
            l1_tokens=512,
            max_num_seqs=4,
            max_batched_tokens=32,
            max_mixed_tokens=32,
        )
        yield bench
        bench.settle()
        bench.stop()


def test_gives_the_golden_tokens_cold_and_after_a_hit(bench: Bench) -> None:
    cases = [tiny_case("llama3", number) for number in range(3)]
    requests = [request(case.prompt_ids, len(case.greedy_ids)) for case in cases]
    cold = bench.run(*requests)
    for case, asked, outcome in zip(cases, requests, cold, strict=True):
        assert outcome.cached == 0
        case.check_tokens(outcome)
        hit = bench.one(asked)
        assert hit.cached == bench.matched_tokens(asked)
        case.check_tokens(hit)
        check_hit(outcome, hit, case)
