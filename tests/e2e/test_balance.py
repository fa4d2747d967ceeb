"""How a router spreads load over real engines: evenly where nothing is cached, else to the cache, and past it
where that engine has too much to do.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from jkv.bench.ideal import IdealCache
from tests.e2e.cluster import PAGE, Cluster
from tests.e2e.server import wait_for

Prompt = list[int]


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much of each kind of load; a mix has prompts of `groups`, which share all but a few tokens.

    `uneven` is by how much an engine may have more or less of the unique prompts than its share: their speeds
    are measured, and a busy machine gives each another one.
    """

    unique: int
    uneven: float
    hot: int
    hot_at_once: int
    groups: int
    mixed: int
    mixed_at_once: int


SMALL = Load(unique=40, uneven=0.6, hot=64, hot_at_once=24, groups=6, mixed=120, mixed_at_once=4)
LARGE = Load(unique=400, uneven=0.2, hot=256, hot_at_once=64, groups=24, mixed=600, mixed_at_once=8)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("four"), ("one", "two", "three", "four"))
    with cluster.stack:
        for id in cluster.servers:
            cluster.router.wait_state(id, "serving")
            wait_for(lambda id=id: cluster.router.engine(id).self_test == "passed", f"self-test of {id}", 60)
        yield cluster


@pytest.fixture(params=[SMALL, pytest.param(LARGE, marks=pytest.mark.full)], ids=["two", "four"])
def loaded(request: pytest.FixtureRequest) -> tuple[Cluster, Load]:
    """Two engines with a little load, or four with much."""
    return request.getfixturevalue("cluster" if request.param is SMALL else "four"), request.param


def _tokens(chance: random.Random, count: int) -> Prompt:
    return [chance.randrange(3, 512) for _ in range(count)]


def _send(
    cluster: Cluster, salt: str, prompts: Sequence[Prompt], at_once: int, tokens: int = 2
) -> tuple[Counter[str], int]:
    """How many requests each engine answered, and how many prompt tokens were cached."""
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda prompt: cluster.ask(salt, tokens, prompt), prompts))
    return Counter(engine for engine, _ in answers), sum(usage["cached_tokens"] for _, usage in answers)


def test_prompts_that_nobody_has_go_to_all_engines_alike(loaded: tuple[Cluster, Load]) -> None:
    cluster, load = loaded
    chance = random.Random(1)
    served, cached = _send(cluster, "unique", [_tokens(chance, 60) for _ in range(load.unique)], 1)
    assert cached == 0
    share = load.unique / len(cluster.servers)
    assert served.keys() == cluster.servers.keys()
    assert all(abs(count - share) <= load.uneven * share for count in served.values()), served


def test_a_hot_prefix_stays_where_it_is_until_that_engine_has_too_much_to_do(
    loaded: tuple[Cluster, Load],
) -> None:
    cluster, load = loaded
    chance = random.Random(2)
    hot = _tokens(chance, 30 * PAGE)
    prompts = [hot + _tokens(chance, PAGE) for _ in range(load.hot)]
    served, _ = _send(cluster, "hot", prompts[:8], 1)
    assert len(served) == 1
    # Answers that keep slots for longer than another engine needs to compute the prefix.
    served, cached = _send(cluster, "hot", prompts, load.hot_at_once, tokens=64)
    assert served.keys() == cluster.servers.keys()
    # Each engine computes it once, or a few times before it is there.
    assert cached >= 0.7 * len(hot) * len(prompts), (cached, served)


def test_a_mix_finds_nearly_all_that_could_be_cached(loaded: tuple[Cluster, Load]) -> None:
    cluster, load = loaded
    chance = random.Random(3)
    groups = [_tokens(chance, 20 * PAGE) for _ in range(load.groups)]
    prompts = [chance.choice(groups) + _tokens(chance, 12) for _ in range(load.mixed)]
    ideal, possible = IdealCache(PAGE), 0
    for prompt in prompts:
        possible += ideal.hit_tokens(prompt)
        ideal.add(prompt, [])
    served, cached = _send(cluster, "mix", prompts, load.mixed_at_once)
    assert cached >= 0.9 * possible, (cached, possible)
    assert served.keys() == cluster.servers.keys()
