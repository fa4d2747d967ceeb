from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from jkv.bench.__main__ import main
from jkv.bench.cluster import ClusterOptions, load_of, run
from jkv.bench.cluster_engine import Job, SimCache, SimEngine, Speeds
from jkv.bench.cluster_real import group_prompts, scaled
from jkv.cache.pages import Tier
from tests.bench.traces import make_trace
from tests.e2e.server import TINY

_SPEEDS = Speeds(prefill_tokens_per_s=100.0, l2_bytes_per_s=1000.0, page_bytes=100, tpot_s=0.5, slots=1)


def _job(keys: list[bytes], tokens: int, output: int = 3) -> Job:
    return Job(arrival=0.0, tokens=tokens, keys=keys, output_tokens=output)


def _keys(*numbers: int) -> list[bytes]:
    return [bytes([number] * 16) for number in numbers]


def test_an_engine_takes_the_time_of_what_it_loads_and_computes() -> None:
    engine = SimEngine(_SPEEDS, SimCache(l1=4, l2=4), page_size=10)
    first = _job(_keys(1, 2, 3), 35)
    engine.submit(first)
    assert engine.start_next(0.0) == (first, pytest.approx(0.35))
    assert engine.start_next(0.1) is None  # one prompt at a time
    assert engine.prefilled(first) == pytest.approx(0.35 + 2 * 0.5)
    assert engine.start_next(0.5) is None
    second = _job(_keys(1, 2, 4, 5, 6, 7), 60)
    engine.submit(second)
    assert engine.report().prefill_tokens == 40
    assert engine.start_next(1.0) is None  # no slot
    engine.finished()
    assert engine.start_next(1.35) == (second, pytest.approx(1.35 + 0.4))
    engine.prefilled(second)
    engine.finished()
    # Six pages do not fit into L1: the last used went down from their end, after page 3.
    third = _job(_keys(1, 2, 4, 5, 6, 7), 60)
    engine.submit(third)
    started = engine.start_next(10.0)
    assert started is not None
    assert third.cached_tokens == 59
    assert started[1] == pytest.approx(10.0 + 2 * 0.1 + 0.01)


def test_a_cache_tells_what_has_changed_since_it_was_asked() -> None:
    cache = SimCache(l1=2, l2=1)
    cache.use(_keys(1, 2))
    assert cache.take_changes()[Tier.L1] == (b"".join(_keys(2, 1)), b"")
    cache.use(_keys(1, 3))
    changes = cache.take_changes()
    assert changes[Tier.L1][1] == b"".join(_keys(2))
    assert changes[Tier.L2] == (b"".join(_keys(2)), b"")
    assert cache.match(_keys(1, 2)) == (2, 1)
    cache.use(_keys(4, 5))
    assert cache.match(_keys(4, 5)) == (2, 0)
    assert cache.match(_keys(2)) == (0, 0)
    assert cache.take_changes()[Tier.L2] == (b"".join(_keys(1)), b"".join(_keys(3, 2)))
    assert cache.take_changes() == {}


def test_cache_aware_keeps_hits_and_beats_the_others_near_saturation() -> None:
    results = run(ClusterOptions(requests=300, rates="0.9")).results
    assert results.ideal_hit_rate > 0.7
    (at,) = results.rates
    ours, *others = at.policies
    assert ours.policy == "cache-aware"
    assert ours.hits_of_ideal > 0.9
    for other in others:
        assert other.hits_of_ideal < 0.5
        assert ours.ttft_p90 < other.ttft_p90
        assert ours.requests_per_s > 1.5 * other.requests_per_s


def test_equal_seeds_give_equal_results() -> None:
    options = ClusterOptions(requests=60, rates="0.5", engines=3, l2_share=0.5)
    assert run(options).results == run(options).results


def test_a_trace_keeps_its_intervals_and_blocks(tmp_path: Path) -> None:
    path = make_trace(tmp_path / "trace.jsonl", requests=80)
    load = load_of(ClusterOptions(file=str(path), requests=50, engines=4))
    assert len(load.requests) == 50
    jobs = list(load.jobs(2.0))
    gaps = {round(b.arrival - a.arrival, 6) for a, b in pairwise(jobs)}
    assert gaps == {0.5}
    assert 0 < load.ideal_hit_tokens < load.prompt_tokens
    assert all(len(job.keys) == job.tokens // 512 for job in jobs)


def test_the_command_prints_all_policies_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "--requests", "30", "--rates", "0.5,1", "--engines", "2", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [rate["of_capacity"] for rate in results["rates"]] == [0.5, 1.0]
    for rate in results["rates"]:
        names = [each["policy"] for each in rate["policies"]]
        assert names == ["cache-aware", "least-loaded", "round-robin", "random"]


def test_the_load_of_real_engines_is_the_simulated_one_in_small() -> None:
    shape = scaled(2)
    assert (shape.groups, shape.shared_tokens, shape.own_tokens, shape.output_tokens) == (6, 704, 150, 8)
    load = group_prompts(shape, 60, vocab_size=500, seed=1)
    assert load == group_prompts(shape, 60, vocab_size=500, seed=1)
    starts = Counter(prompt[: shape.shared_tokens] for prompt in load)
    assert len(starts) == 6
    assert min(starts.values()) > 1
    assert len({prompt[shape.shared_tokens :] for prompt in load}) == 60
    assert {len(prompt) for prompt in load} == {854}


@pytest.mark.full
def test_real_engines_are_measured_and_simulated_with_their_speeds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    serve = f"--model {TINY} --max-batched-tokens 128"
    flags = ("--real-engines", "2", "--real-requests", "12", "--serve-flags", serve)
    assert main(["cluster", "--requests", "30", "--rates", "0.5", "--json", *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    real, simulated = document["results"]["real"], document["results"]["rates"][0]["policies"]
    assert (real["engines"], real["requests"], real["model"]) == (2, 24, "llama3")
    names = ["cache-aware", "least-loaded", "round-robin", "random"]
    assert [each["policy"] for each in real["policies"]] == names
    assert [each["policy"] for each in simulated] == names
    for each in real["policies"]:
        assert each["requests_per_s"] > 0
        assert 0 < each["ttft_p50"] <= each["ttft_p90"]
        assert 0 < each["hits_of_ideal"] <= 1
    speeds = real["speeds"]
    assert min(speeds[name] for name in ("prefill_tokens_per_s", "l2_bytes_per_s", "tpot_s")) > 0
    assert (
        speeds["page_bytes"] == 3 * 64 * 2 * 2 * 16 * 4
    )  # layers, tokens, K and V, heads, head size, float32
    capacity = 8 * speeds["prefill_tokens_per_s"]
    assert document["results"]["ideal_requests_per_s"] < capacity


@pytest.mark.parametrize("rates", ["0", "fast", "1,,2", "inf"])
def test_wrong_rates_are_refused(rates: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "--rates", rates]) == 2
    assert f"--rates {rates}: " in capsys.readouterr().err
