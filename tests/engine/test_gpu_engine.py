"""An engine with the GPU's kernels, interpreted on CPU, against transformers' greedy tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jkv.engine.programs import ProgramPlan
from jkv.kernels.attention import AttentionSpec
from jkv.kernels.gpu_blocks import GpuBlocks, Tiles
from jkv.kernels.gpu_grouped_tiles import GroupedTiles
from jkv.models.experts import ExpertProduct
from tests.engine.harness import Bench, build, request, tiny_checkpoint
from tests.engine.oracle import check_hit, tiny_case

_BUCKET = 32


class _Interpreted(ProgramPlan):
    """One step program, of one layer's code, for interpreted kernels take long to compile."""

    @property
    def unroll_layers(self) -> bool:
        return False

    @property
    def token_buckets(self) -> tuple[int, ...]:
        return (_BUCKET,)

    def expert_product(self, tokens: int) -> ExpertProduct:
        return GroupedTiles(rows=16, columns=32, depth=32, warps=4, stages=2, interpret=True)

    @property
    def attention(self) -> AttentionSpec:
        tiles = Tiles(rows=16, keys=32, warps=4, stages=2)
        blocks = GpuBlocks(decode=tiles, prefill=tiles, programs=3, least_split=32, one_path=False)
        return AttentionSpec(kernel="triton", blocks=blocks, interpret=True)


@pytest.fixture(params=["llama3", "mixtral"])
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def bench(model: str) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jkv.engine.planning.ProgramPlan", _Interpreted)
        patch.setattr("jkv.engine.planning.has_panels", lambda *_: False)
        bench = build(tiny_checkpoint(model), page_size=16, l1_tokens=1024, max_batched_tokens=_BUCKET)
    yield bench
    bench.stop()


def test_greedy_tokens_are_those_of_transformers_cold_and_as_a_hit(model: str, bench: Bench) -> None:
    assert bench.runner.plan.attention.kernel == "triton"
    asked = [tiny_case(model, n) for n in (0, 1)]
    requests = [request(c.prompt_ids, len(c.greedy_ids)) for c in asked]
    colds = bench.run(*requests)
    for case, again, cold in zip(asked, requests, colds, strict=True):
        case.check_tokens(cold)
        hit = bench.one(again)
        assert hit.by_tier.l1 == bench.matched_tokens(again)
        check_hit(cold, hit, case)
