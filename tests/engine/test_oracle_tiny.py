"""The tiny checkpoints against transformers' logits and greedy tokens: the model alone, then the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jkv.engine.batches import build_step
from jkv.engine.build import use_compilation_cache
from jkv.engine.programs import ProgramPlan, programs, step_name, table_width, weights
from jkv.engine.scheduler import Chunk
from jkv.engine.sequence import Sequence
from jkv.kernels.kv_pool import PoolShape
from jkv.models.config import ModelConfig
from jkv.models.experts import ExpertProduct
from jkv.models.forward import logits
from jkv.models.params import Params, load_params
from tests.engine.conftest import Tiny
from tests.engine.harness import request, tiny_checkpoint
from tests.engine.oracle import CASES_PER_MODEL, check_hit, tiny_case
from tests.models.golden import LATER_NAMES, NAMES

_PAGE, _PAGES, _ROWS, _LARGEST = 16, 32, 8, 256


def _in_long_runs(combination: tuple[str, Any], where: bool) -> Any:
    """Most of the later models' combinations: what they add is seen in few."""
    return pytest.param(*combination, marks=pytest.mark.full if where else ())


LOGITS = [_in_long_runs((n, s), n in LATER_NAMES and not s) for n in NAMES for s in (False, True)]
GREEDY = [
    _in_long_runs((n, page), n in LATER_NAMES and (n, page) != ("gemma3", 16))
    for n in NAMES
    for page in (8, 16, 64)
]
in_both_dialects = pytest.mark.parametrize("dialect", ["config.json", "config.hub.json"])


@dataclass(frozen=True, kw_only=True)
class TwoBuckets(ProgramPlan):
    """Compiles one program for decoding and one for everything else."""

    stacked: bool

    @property
    def unroll_layers(self) -> bool:
        return not self.stacked

    def expert_product(self, tokens: int) -> ExpertProduct:
        return None if self.stacked else super().expert_product(tokens)

    @property
    def token_buckets(self) -> tuple[int, ...]:
        return 1, _LARGEST


class Model:
    """The registry's step programs, driven by hand over scattered pages."""

    def __init__(self, config: ModelConfig, params: Params, *, stacked: bool) -> None:
        shape = PoolShape(
            layers=config.num_layers,
            pages=_PAGES,
            page_size=_PAGE,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=jnp.float32,
        )
        self.plan = TwoBuckets(
            platform="cpu",
            config=config,
            dtype="float32",
            pool=shape,
            max_num_seqs=_ROWS,
            max_batched_tokens=_LARGEST,
            table_width=table_width(512, _PAGE),
            batch_invariant=False,
            stacked=stacked,
        )
        self.params = params
        steps = {step_name(b) for b in self.plan.token_buckets}
        self.compiled: dict[str, Callable[..., Any]] = {
            p.name: p.lower().compile() for p in programs(self.plan) if p.name in steps
        }

    def last_logits(self, prompt: tuple[int, ...], cuts: list[int]) -> np.ndarray:
        """Logits of the prompt's last positions, 8 at most, computed in chunks that end at `cuts`."""
        # What lies in unwritten rows must not matter.
        pool = jax.tree.map(lambda x: jnp.full(x.shape, 1e3, x.dtype), self.plan.pool.abstract_pool())
        seq = Sequence(request=request(prompt, 1), root=b"", arrival=0)
        seq.pages = (
            np.random.default_rng(len(prompt)).permutation(_PAGES)[: len(prompt) // _PAGE + 1].tolist()
        )
        hidden: jax.Array | None = None
        for start, end in zip([0, *cuts], [*cuts, len(prompt)], strict=True):
            chunk = Chunk(seq=seq, start=start, count=end - start, frozen=frozenset(), sample=True)
            step = build_step([chunk], self.plan)
            step.batch.sample_rows[:] = np.clip(np.arange(end - start - _ROWS, end - start), 0, None)
            last_tokens = jnp.zeros(_ROWS, jnp.int32)
            run = self.compiled[step_name(step.tokens)]
            hidden, pool = run(weights(self.params), pool, last_tokens, step.packed)
        assert hidden is not None
        count = min(len(prompt) - (cuts[-1] if cuts else 0), _ROWS)
        return np.asarray(logits(self.plan.config, self.params, hidden, dense="xla"))[-count:]


@in_both_dialects
@pytest.mark.parametrize(("model", "stacked"), LOGITS)
def test_logits(model: str, dialect: str, stacked: bool) -> None:
    use_compilation_cache()
    checkpoint = tiny_checkpoint(model, dialect)
    params = load_params(checkpoint.config, checkpoint.source, jnp.float32, stacked=stacked, workers=2)
    forward = Model(checkpoint.config, params, stacked=stacked)
    for number in range(CASES_PER_MODEL):
        case = tiny_case(model, number)
        length = len(case.prompt_ids)
        assert forward.last_logits(case.prompt_ids, []) == pytest.approx(case.last_logits, abs=1e-4)
        if length > 3:
            chunked = forward.last_logits(case.prompt_ids, [length // 3, length - 9 if length > 30 else 4])
            assert chunked == pytest.approx(case.last_logits[-len(chunked) :], abs=1e-4)
            decoded = forward.last_logits(case.prompt_ids, [length // 3, length - 2, length - 1])
            assert decoded == pytest.approx(case.last_logits[-1:], abs=1e-4)


@in_both_dialects
@pytest.mark.parametrize(("model", "page_size"), GREEDY)
def test_greedy_tokens_cold_and_after_a_hit(tiny: Tiny, model: str, dialect: str, page_size: int) -> None:
    # A step of 8 tokens: few programs to compile, many chunks.
    bench = tiny(model, page_size, dialect, max_num_seqs=1, max_batched_tokens=8, max_mixed_tokens=8)
    for number in range(CASES_PER_MODEL):
        case = tiny_case(model, number)
        r = request(case.prompt_ids, len(case.greedy_ids))
        cold = bench.cold(r)
        case.check_tokens(cold)
        assert bench.one(r).cached == 0
        hit = bench.one(r)
        assert hit.cached == bench.matched_tokens(r)
        case.check_tokens(hit)
        check_hit(cold, hit, case)
        assert bench.first_logits(r) == pytest.approx(case.last_logits[-1], abs=1e-4)
