from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.server import GOLDEN, TINY, Server, serving, wait_for


@pytest.fixture(scope="session")
def golden() -> dict[str, dict[str, Any]]:
    """The default model's golden cases by name."""
    lines = (GOLDEN / "smollm2_135m_instruct.jsonl").read_text().splitlines()
    return {case["name"]: case for case in map(json.loads, lines)}


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default model with few programs, four slots and room for two that wait."""
    flags = "--max-num-seqs 4 --max-batched-tokens 128 --max-mixed-tokens 64 --l1-pages 160 --max-queue 2"
    with serving(tmp_path_factory.mktemp("smollm2"), *flags.split()) as server:
        yield server


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A checkpoint without a tokenizer, told by a file and flags; L1 holds less than its context."""
    directory = tmp_path_factory.mktemp("tiny")
    config = directory / "jkv.toml"
    config.write_text(
        'served-model-name = "from-file"\npage-size = 64\nl1-gib = "1GiB"\nmax-num-seqs = 4\n'
        "max-batched-tokens = 64\nmax-mixed-tokens = 32\nmax-model-len = 512\n"
    )
    flags = ("--config", str(config), "--model", str(TINY))
    with serving(directory, *flags, "--page-size", "16", "--l1-pages", "20") as server:
        yield server


@pytest.fixture(scope="package")
def standing_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    with cluster.stack:
        yield cluster


@pytest.fixture
def cluster(standing_cluster: Cluster) -> Iterator[Cluster]:
    """Two engines that serve. Whatever a test did to them, the router knows afterwards what they hold."""
    _all_serve(standing_cluster)
    yield standing_cluster
    _all_serve(standing_cluster)
    standing_cluster.wait_agreed()


def _all_serve(cluster: Cluster) -> None:
    """Starts again, at its address, what a test has killed."""
    for id, server in list(cluster.servers.items()):
        if server.process.poll() is not None:
            cluster.restart(id)
        cluster.router.wait_state(id, "serving")
        wait_for(lambda id=id: cluster.router.engine(id).self_test != "pending", f"self-test of {id}", 60)
