"""The contract on the default model: golden cases, one of them long, cold and from every tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from jkv.cache.pages import Tier
from jkv.engine.request import CachedByTier
from jkv.models.resolve import ModelFiles, cached_orbax, open_checkpoint, resolve_model
from tests.engine.harness import Bench, Outcome, build, request
from tests.engine.oracle import SmolCase, check_hit, smol_cases
from tests.engine.test_tiers import from_tier

pytestmark = pytest.mark.full

_PAGE = 64
_CASES = [case for name, case in smol_cases().items() if name in ("multi-turn", "unicode", "long-doc-3k")]


@pytest.fixture(scope="module")
def files(smollm2_gguf: Path) -> ModelFiles:
    return cached_orbax(resolve_model(str(smollm2_gguf)))


def _build(files: ModelFiles, directory: Path, batch_invariant: bool) -> Bench:
    return build(
        open_checkpoint(files),
        page_size=_PAGE,
        l1_tokens=8192,
        max_num_seqs=1,
        max_batched_tokens=128,
        l2_gib=0.5,
        l3_gib=0.5,
        l3_dir=str(directory),
        load_policy="always",
        batch_invariant=batch_invariant,
    )


def _check(cold: Outcome, hit: Outcome, case: SmolCase, batch_invariant: bool) -> None:
    case.check_tokens(hit)
    check_hit(cold, hit, case)
    if batch_invariant:
        assert hit.bits == cold.bits


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["default", "batch-invariant"])
def test_golden_cases_from_every_tier_and_after_a_restart(
    files: ModelFiles, tmp_path: Path, batch_invariant: bool
) -> None:
    bench = _build(files, tmp_path, batch_invariant)
    requests = [request(case.prompt_ids, len(case.greedy_ids), top_logprobs=5) for case in _CASES]
    cold = [bench.one(r) for r in requests]
    for case, r, first in zip(_CASES, requests, cold, strict=True):
        assert first.by_tier == CachedByTier()
        case.check_tokens(first)
        bench.one(r)  # brings up what was flushed for the case before
        for tier in Tier:
            _check(first, from_tier(bench, tier, r), case, batch_invariant)
    bench.stop()
    assert not bench.violations
    bench = _build(files, tmp_path, batch_invariant)
    for case, r, first in zip(_CASES, requests, cold, strict=True):
        again = bench.one(r)
        assert again.by_tier == CachedByTier(l3=bench.matched_tokens(r))
        _check(first, again, case, batch_invariant)
    bench.stop()
