"""Real engines, a real router and a real etcd, and what happens when engines die under a request."""

from __future__ import annotations

import itertools
import json
import signal
from typing import Any

import pytest

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from tests.e2e.calls import collect
from tests.e2e.cluster import LONG, PAGE, PROMPT, Cluster, request
from tests.e2e.server import run, wait_for
from tests.scrape import scrape


def test_what_an_engine_has_computed_is_found_through_the_router(cluster: Cluster) -> None:
    for id in cluster.servers:
        assert cluster.router.engine(id).self_test == "passed"
    first = cluster.router.generation.Generate(request(4, "found"))
    collect(first)
    served = dict(first.initial_metadata())["jkv-engine"]
    cluster.wait_agreed()
    for _ in range(4):
        again = cluster.router.generation.Generate(request(4, "found"))
        assert collect(again).usage["cached_tokens"] == 48
        assert dict(again.initial_metadata())["jkv-engine"] == served
    prompt = ",".join(map(str, PROMPT))
    flags = ("--token-ids", prompt, "--salt", "found", "--address", cluster.router.address, "--json")
    explained = json.loads(run("jkv.client", "route", "explain", *flags).stdout)
    assert explained["chosen"] == served
    assert explained["engines"][0]["matched"]["l1"] == 48
    assert explained["engines"][1]["matched"]["l1"] == 0


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.9, "seed": 11, "presence_penalty": 0.7, "repetition_penalty": 1.3}],
    ids=["greedy", "seeded and penalized"],
)
def test_an_answer_goes_on_bit_by_bit_where_its_engine_has_stopped(
    cluster: Cluster, fault: signal.Signals, sampling: dict[str, Any]
) -> None:
    salt = f"{fault.name}{len(sampling)}"
    asked = request(LONG, salt, **sampling)
    (whole,) = collect(cluster.servers["two"].stub.Generate(asked)).choices.values()
    asked.cache_salt += "again"
    call = cluster.router.generation.Generate(asked, timeout=60)
    begun = [next(call)]
    busy = dict(call.initial_metadata())["jkv-engine"]
    cluster.stop(busy, fault)
    try:
        answer = collect(itertools.chain(begun, call))
        (choice,), usage = answer.choices.values(), answer.usages[0]
        served = [value for key, value in call.trailing_metadata() if key == "jkv-engine"]
        assert len(served) == 2, "the answer was done before its engine was stopped"
        assert choice == whole
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), LONG)
        assert usage.cached_tokens == 0
    finally:
        if fault is signal.SIGSTOP:
            cluster.stop(busy, signal.SIGCONT)


def test_before_the_first_token_clients_see_nothing_of_a_death(cluster: Cluster) -> None:
    victim = "one"
    calls = [cluster.router.generation.Generate(request(30, f"many{i}"), timeout=60) for i in range(12)]
    cluster.stop(victim, signal.SIGKILL)
    for call in calls:
        assert collect(call).choices[0].finish_reason == "length"
    cluster.router.wait_state(victim, "connecting")

    def forgotten() -> bool:
        pages = cluster.router.engine(victim).pages
        return not pages["l1"] and not pages["l2"]

    wait_for(forgotten, "what was in its memory is forgotten", 10)


def test_an_engine_fetches_what_another_one_has(cluster: Cluster) -> None:
    turns = cluster.another_router("turns", "--policy", "round-robin")
    try:
        for id in cluster.servers:
            turns.wait_state(id, "serving")
        served = {}
        for _ in range(2):
            call = turns.generation.Generate(request(4, "fetched"), timeout=20)
            usage = collect(call).usage
            served[dict(call.initial_metadata())["jkv-engine"]] = usage["cached_by_tier"]["peer"]
            cluster.wait_agreed(turns)
        assert sorted(served.values()) == [0, 48]
        assert sorted(served) == ["one", "two"]
    finally:
        turns.kill()


def test_metrics_tell_what_the_services_tell(cluster: Cluster) -> None:
    for id in cluster.servers:
        cluster.drain(id)
    cluster.wait_agreed()
    router, before = scrape(cluster.router.metrics_address), {}
    for id, server in cluster.servers.items():
        found = before[id] = scrape(server.metrics_address)
        cache: Any = pb_grpc.CacheStub(server.channel)
        for tier in cache.Stats(pb.CacheStatsRequest(), timeout=10).tiers:
            told = (tier.pages, tier.bytes_capacity, tier.hit_tokens, tier.evictions, tier.stores)
            names = ("cache_pages", "cache_capacity_bytes", "cached_tokens_total", "cache_evictions_total")
            assert (
                *(found[f"jkv_{name}", tier.tier] for name in names),
                found["jkv_cache_stores_total", tier.tier],
            ) == told
        assert (found["jkv_cluster_registered"], found["jkv_cluster_recording"]) == (1, 1)
        status = cluster.router.engine(id)
        for tier in ("l1", "l2", "l3"):
            assert router["jkv_router_engine_pages", id, tier] == status.pages[tier]
        assert router["jkv_router_self_test_predicted_tokens", id] == 2 * PAGE
        assert router["jkv_router_self_test_cached_tokens", id] == 2 * PAGE
    assert (router["jkv_router_members"], router["jkv_router_membership_frozen"]) == (2, 0)

    cluster.ask("measured", tokens=5)
    served, usage = cluster.ask("measured", tokens=5)
    after, told = scrape(cluster.servers[served].metrics_address), scrape(cluster.router.metrics_address)
    grown = {
        name: after[name] - before[served][name]
        for name in ("jkv_prompt_tokens_total", "jkv_generated_tokens_total")
    }
    assert grown == {"jkv_prompt_tokens_total": 2 * len(PROMPT), "jkv_generated_tokens_total": 10}
    cached = "jkv_cached_tokens_total", "l1"
    assert after[cached] - before[served][cached] == usage["cached_tokens"] == 48
    decisions = "jkv_router_decisions_total", served
    assert told[decisions] - router[decisions] == 2
