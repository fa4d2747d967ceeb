"""The default model against transformers: every golden case, cold and as a hit, and through every format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from jkv.models.config import ModelConfig
from jkv.models.resolve import ModelFiles, cached_orbax, open_checkpoint, resolve_model
from tests.engine.harness import Bench, build, request
from tests.engine.oracle import SmolCase, check_hit, smol_cases

_ALL = smol_cases()
_LONG = {"long-doc-3k", "long-doc-6k"}
_SHORT = ("capital", "multi-turn")
# Few programs, for compiling them takes most of the time.
_SMALL = {"l1_tokens": 8192, "max_num_seqs": 1, "max_batched_tokens": 32}


def _build(files: ModelFiles, page_size: int, **flags: int) -> Bench:
    return build(open_checkpoint(files), page_size=page_size, **{**_SMALL, **flags})


@pytest.fixture(scope="module")
def gguf(smollm2_gguf: Path) -> ModelFiles:
    return resolve_model(str(smollm2_gguf))


@pytest.fixture(scope="module", params=[64, 16], ids=["page64", "page16"])
def bench(gguf: ModelFiles, request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = _build(gguf, request.param)
    yield bench
    bench.settle()
    bench.stop()


def check(bench: Bench, case: SmolCase) -> None:
    bench.settle()
    r = request(case.prompt_ids, len(case.greedy_ids), top_logprobs=5)
    cold = bench.one(r)
    assert cold.cached == 0
    case.check_tokens(cold)
    hit = bench.one(r)
    assert hit.cached == bench.matched_tokens(r)
    case.check_tokens(hit)
    check_hit(cold, hit, case)
    for outcome in (cold, hit):
        first = outcome.logprobs[0]
        assert first.logprob == pytest.approx(case.first_logprob, abs=5e-4)
        assert [token for token, _ in first.top] == [token for token, _ in case.top5]
    logits = bench.first_logits(r)
    assert [logits[token] for token, _ in case.top5] == pytest.approx([x for _, x in case.top5], abs=5e-4)


@pytest.mark.parametrize("name", [n for n in _ALL if n not in _LONG])
def test_golden_case(bench: Bench, name: str) -> None:
    check(bench, _ALL[name])


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(_LONG))
def test_long_document(bench: Bench, name: str) -> None:
    check(bench, _ALL[name])


@pytest.mark.full
def test_bits_do_not_depend_on_hits_and_neighbours(gguf: ModelFiles) -> None:
    bench = _build(cached_orbax(gguf), 16, batch_invariant=True, max_num_seqs=8, max_batched_tokens=128)
    cases = [c for c in _ALL.values() if c.name not in _LONG]
    requests = [request(c.prompt_ids, 24, top_logprobs=5) for c in cases]
    cold = [bench.cold(r).bits for r in requests]
    assert [o.bits for o in bench.run(*requests, *requests[::-1])] == cold + cold[::-1]
    hits = bench.run(*requests)
    assert [o.bits for o in hits] == cold
    assert [o.cached for o in hits] == [bench.matched_tokens(r) for r in requests]
    bench.stop()


def _hf_config(config: ModelConfig) -> dict[str, object]:
    return {
        "architectures": [config.architecture],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids),
        "bos_token_id": config.bos_token_id,
    }


def _as_orbax(files: ModelFiles, _: Path) -> ModelFiles:
    return cached_orbax(files)


def _as_safetensors(files: ModelFiles, out: Path) -> ModelFiles:
    checkpoint = open_checkpoint(files)
    source = checkpoint.source
    save_file({n: source.read(n) for n in source.names()}, str(out / "model.safetensors"))
    (out / "config.json").write_text(json.dumps(_hf_config(checkpoint.config)))
    return resolve_model(str(out))


@pytest.mark.parametrize("convert", [_as_orbax, _as_safetensors], ids=["orbax", "safetensors"])
def test_other_formats_give_the_same_tokens(
    gguf: ModelFiles, tmp_path: Path, convert: Callable[[ModelFiles, Path], ModelFiles]
) -> None:
    """The tests above read the GGUF."""
    bench = _build(convert(gguf, tmp_path), 64)
    for name in _SHORT:
        check(bench, _ALL[name])
    bench.stop()
