from __future__ import annotations

import json
from itertools import pairwise

import pytest

from jkv.bench.__main__ import main
from jkv.bench.router_load import Cluster, Shape
from jkv.bench.router_records import measure
from jkv.cache.pages import Tier


def test_churn_exchanges_pages_and_keeps_their_number() -> None:
    shape = Shape(pages=20_000, engines=3, prompts=4, input_len=640, page_size=64, seed=1)
    cluster = Cluster(shape)
    cluster.fill()
    index = cluster.routing.index
    index.check()
    pages = index.pages
    assert 20_000 <= pages < 21_000
    counts = [
        sum(index.holder(target.name).digest()[tier].pages for tier in Tier) for target in cluster.targets
    ]
    assert sum(counts) >= pages * 1.1  # a tenth is held by two
    before = index.nbytes
    for event in cluster.churn_events(120_000, 0):  # three times what there is
        cluster.hear(*event)
        assert index.pages == pages
    index.check()
    assert index.nbytes <= before * 1.01


def test_prompts_are_found_where_they_are() -> None:
    cluster = Cluster(Shape(pages=5000, engines=2, prompts=20, input_len=6400, page_size=64, seed=1))
    cluster.fill()
    for token_ids in cluster.prompts:
        cluster.decide(token_ids)
    hits = [6400 - sent.prefill_tokens for _, sent in cluster._in_flight]
    assert max(hits) > 3200
    assert len({target.name for target, _ in cluster._in_flight}) == 2
    cluster.settle()
    assert len(cluster._in_flight) == 8


def test_records_cost_little_of_a_write_a_page() -> None:
    found = measure(6400, seed=0)
    assert found.filling < 1 / 32
    assert found.filling < found.churning < 1 / 4


@pytest.mark.full
def test_the_whole_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--pages", "1000000", "--engines", "2,4", "--seconds", "0.5", "--rate", "50", "--json"]
    assert main(["router", *flags]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [size["engines"] for size in results["sizes"]] == [2, 4]
    for size in results["sizes"]:
        assert size["pages"] >= 1_000_000
        assert 16 < size["bytes_per_page"] < 100
        for kind in ("quiet", "churning"):
            latency = size[kind]["latency"]
            values = [latency["p50"], latency["p90"], latency["p99"]]
            assert values[0] > 0
            assert all(one <= other for one, other in pairwise(values))


def test_a_wrong_number_of_engines_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "--engines", "1,none"]) == 2
    assert "--engines 1,none: 'none' is not a number of engines" in capsys.readouterr().err
