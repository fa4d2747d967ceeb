"""Models that several devices share: `test_tensor_parallel` runs these in a process that has eight."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from jkv.cache.pages import Tier
from jkv.engine.host_pages import HostPage
from jkv.engine.programs import ProgramPlan, gather_name, programs, sample_name, scatter_name, step_name
from jkv.engine.request import CachedByTier
from jkv.engine.runner import Runner
from jkv.kernels.gpu_grouped_tiles import GroupedTiles
from jkv.kernels.mesh import TP
from jkv.models.hf_config import from_hf
from jkv.models.params import Params, abstract_params, layer_definition, load_params
from jkv.models.resolve import cached_orbax, open_checkpoint, resolve_model
from tests.engine.conftest import ALL_TIERS, L1_TOKENS
from tests.engine.harness import (
    Bench,
    build,
    random_checkpoint,
    random_prompt,
    request,
    tiny_checkpoint,
    with_salt,
)
from tests.engine.oracle import CASES_PER_MODEL, check_hit, smol_cases, tiny_case
from tests.engine.plans import SMOLLM2, over, plan_of
from tests.models.golden import config_json

_PAGE = 16
# An engine with few programs.
_FLAGS = {"max_num_seqs": 1, "max_batched_tokens": 8, "max_mixed_tokens": 8}
# Neither the vocabulary nor the MLP divides by 8, nor the layers by the copies of a KV head.
_SHAPE = dataclasses.replace(
    SMOLLM2,
    vocab_size=500,
    hidden_size=128,
    intermediate_size=164,
    num_layers=3,
    num_heads=16,
    num_kv_heads=4,
    head_dim=16,
    windows=(None,) * 3,
)

full = pytest.mark.full


def _mesh(tp: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:tp]), (TP,))


@pytest.mark.parametrize(
    ("model", "widths", "flags"),
    [
        pytest.param("llama_wide_heads", (4, 2), {}, id="heads"),
        pytest.param("llama3", (4, 1), {}, id="copies-of-kv-heads"),
        pytest.param("llama_wide_heads", (1, 8, 4, 2, 1), {}, marks=full, id="heads-every-width"),
        pytest.param("llama_mha_tied", (2, 1), {}, marks=full, id="tied"),
        pytest.param("qwen2", (2, 1), {}, marks=full, id="biases"),
        pytest.param("gemma2", (4, 2), {}, marks=full, id="soft-caps"),
        pytest.param("qwen3_moe", (4, 2), {}, marks=full, id="parts-of-experts"),
        pytest.param("qwen3_moe", (4, 2), {"ep": True}, marks=full, id="whole-experts"),
    ],
)
def test_each_width_gives_the_golden_tokens_and_reads_what_the_others_wrote(
    tmp_path: Path, model: str, widths: tuple[int, ...], flags: dict[str, Any]
) -> None:
    written: list[str] = []
    for tp in widths:
        bench, own = _engine(model, tmp_path, tp=tp, **flags), f"the {len(written)}th, on {tp}"
        for number in range(CASES_PER_MODEL):
            case = tiny_case(model, number)
            r = request(case.prompt_ids, len(case.greedy_ids))
            cold = bench.cold(r)
            case.check_tokens(cold)
            for salt in written:
                for tier, above in _ABOVE.items():
                    bench.flush(*above)
                    hit = bench.one(with_salt(r, salt))
                    assert hit.by_tier == CachedByTier(**{tier.value: bench.matched_tokens(r)})
                    case.check_tokens(hit)
                    check_hit(cold, hit, case)
            assert bench.one(with_salt(r, own)).cached == 0
        bench.ask(bench.engine.cache.drain_writes())
        bench.stop()
        written.append(own)


@pytest.mark.parametrize("whole", [True, False])
def test_the_kernel_for_experts_gives_the_same_where_devices_share_them(whole: bool) -> None:
    config, tiles = (
        from_hf(config_json("qwen3_moe")),
        GroupedTiles(rows=16, columns=32, depth=32, warps=4, stages=2, interpret=True),
    )
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, config.hidden_size)), jnp.float32)
    checkpoint = tiny_checkpoint("qwen3_moe")
    found = []
    for mesh in (None, _mesh(4)):
        params = load_params(
            config, checkpoint.source, "float32", stacked=False, workers=2, mesh=mesh, whole_experts=whole
        )
        definition, _ = layer_definition(config, "float32")
        mlp = nnx.merge(definition, params.layers[0]).mlp
        run = partial(mlp, dense="xla", product=tiles, mesh=mesh, whole_experts=whole)
        found.append(np.asarray(jax.jit(run)(x, jnp.int32(13))))
    assert not found[0][13:].any()
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-5)


_ABOVE: dict[Tier, tuple[Tier, ...]] = {Tier.L3: (Tier.L1, Tier.L2), Tier.L2: (Tier.L1,), Tier.L1: ()}


@full
def test_smollm2_on_three_devices_gives_the_golden_tokens(tmp_path: Path) -> None:
    files = cached_orbax(resolve_model("smollm2-135m-instruct", progress=False))
    for tp in (3, 1):
        flags = {**ALL_TIERS, "l2_gib": 1, "l3_gib": 1, "l3_dir": str(tmp_path), "tp": tp}
        bench = build(open_checkpoint(files), page_size=64, l1_tokens=8192, **flags)
        for case in smol_cases().values():
            r = request(case.prompt_ids, len(case.greedy_ids))
            if tp == 1:
                bench.flush(Tier.L1, Tier.L2)  # some cases begin alike
                hit = bench.one(r)
                assert hit.by_tier == CachedByTier(l3=bench.matched_tokens(r))
                check_hit(bench.cold(r), hit, case)
            else:
                case.check_tokens(bench.one(r))
        bench.ask(bench.engine.cache.drain_writes())
        bench.stop()


@full
def test_what_does_not_divide_is_padded_or_whole_on_every_device(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(_SHAPE, tmp_path)
    r, found = request(random_prompt(3, 70), 8), []
    for tp in (8, 1):
        flags = {**ALL_TIERS, **_FLAGS, "l3_dir": str(tmp_path / "l3"), "tp": tp}
        bench = build(checkpoint, page_size=_PAGE, l1_tokens=L1_TOKENS, **flags)
        found.append(bench.first_logits(with_salt(r, "cold")))
        assert bench.one(r).by_tier == CachedByTier(l3=0 if tp == 8 else 64)
        found.append(bench.first_logits(r))
        bench.ask(bench.engine.cache.drain_writes())
        bench.stop()
    for logits in found[1:]:
        assert logits == pytest.approx(found[0], abs=1e-4)


@full
def test_bits_depend_on_nothing_where_that_is_promised_and_pages_of_another_width_are_not_taken(
    tmp_path: Path,
) -> None:
    prompts = [random_prompt(i, 40 + 9 * i) for i in range(4)]
    requests = [request(p, 6, temperature=float(i % 2), seed=i) for i, p in enumerate(prompts)]
    for tp in (4, 2):
        bench = _engine("llama3", tmp_path, tp=tp, batch_invariant=True, max_num_seqs=4)
        alone = [bench.cold(r).bits for r in requests]
        together = bench.run(*requests)
        assert [o.by_tier for o in together] == [CachedByTier()] * 4
        assert [o.bits for o in together] == alone
        for above in _ABOVE.values():
            bench.ask(bench.engine.cache.drain_writes())
            bench.flush(*above)
            hits = bench.run(*requests)
            assert [o.bits for o in hits] == alone
            assert all(o.cached for o in hits)
        bench.stop()


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_a_page_has_the_same_bytes_whatever_the_number_of_devices(kv_dtype: str) -> None:
    plan = plan_of(_SHAPE, dtype="float32", kv_dtype=kv_dtype, pages=5, page_size=16)
    data = np.random.default_rng(0).integers(0, 256, plan.pool.page_bytes, np.uint8)
    for tp in (1, 2, 4, 8):
        runner = _mover(plan if tp == 1 else over(plan, _mesh(tp)))
        page = runner.page_from_bytes(data.copy())
        assert runner.page_to_bytes(page).tobytes() == data.tobytes()
        runner.restore([3], [page])
        (moved,) = runner.save([3])
        assert runner.page_to_bytes(moved).tobytes() == data.tobytes()
        assert [_device_bytes(moved, d) for d in jax.devices()[:tp]] == [runner.host_page_bytes // tp] * tp
        assert not any(any(runner.page_to_bytes(page)) for page in runner.save([2]))


@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("model", ["llama3", "qwen2"])
def test_a_device_only_gets_its_part_of_the_weights(model: str, stacked: bool) -> None:
    checkpoint, mesh = tiny_checkpoint(model), _mesh(4)
    params = load_params(
        checkpoint.config, checkpoint.source, "float32", stacked=stacked, workers=2, mesh=mesh
    )
    abstract = abstract_params(checkpoint.config, "float32", stacked=stacked, mesh=mesh)
    assert jax.tree.map(lambda x: (x.shape, x.sharding), params) == jax.tree.map(
        lambda x: (x.shape, x.sharding), abstract
    )
    whole = sum(x.nbytes for x in jax.tree.leaves(params) if x.ndim > 1 + stacked)
    norms_and_biases = sum(x.nbytes for x in jax.tree.leaves(params) if x.ndim <= 1 + stacked)
    held = sum(s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards) / 4
    assert whole / 4 <= held <= whole / 4 + norms_and_biases


def test_devices_exchange_sums_and_logits_and_never_keys_or_values() -> None:
    plan = over(plan_of(_SHAPE, dtype="float32", pages=4096, page_size=16, max_num_seqs=4), _mesh(4))
    pool = plan.pool.pages * plan.pool.device_page_bytes
    found = {p.name: p for p in programs(plan)}
    step = found[step_name(16)].lower().compile()
    assert _collectives(step) == ["all-reduce"] * (1 + 2 * _SHAPE.num_layers)
    assert _collectives(found[gather_name(4)].lower().compile()) == []
    assert _collectives(found[scatter_name(4)].lower().compile()) == []
    assert _collectives(found[sample_name(4)].lower().compile()) == ["all-gather"]
    memory = step.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == pool
    assert memory.temp_size_in_bytes < pool // 16


def _collectives(compiled: Any) -> list[str]:
    text = compiled.as_text()
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return re.findall(rf" ({kinds})(?:-start)?\(", text)


def _device_bytes(page: HostPage, device: Any) -> int:
    shards = [s for x in jax.tree.leaves(page) for s in x.addressable_shards]
    return sum(s.data.nbytes for s in shards if s.device == device)


def _mover(plan: ProgramPlan) -> Runner:
    """One that moves single pages and does nothing else."""
    names = (gather_name(1), scatter_name(1))
    compiled: dict[str, Callable[..., Any]] = {
        p.name: p.lower().compile() for p in programs(plan) if p.name in names
    }
    nothing = jax.ShapeDtypeStruct((), np.float32)
    return Runner(plan, Params(embed=nothing, layers=None, norm=None, head=None), compiled, seed=0)


def _engine(model: str, directory: Path, **flags: Any) -> Bench:
    flags = {**ALL_TIERS, **_FLAGS, "l3_dir": str(directory), **flags}
    return build(tiny_checkpoint(model), page_size=_PAGE, l1_tokens=L1_TOKENS, **flags)
