"""An engine of a cluster that drains: requests go elsewhere, and what it has computed stays of use."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jkv.api import jkv_pb2 as pb
from tests.e2e.calls import collect, greedy, ids
from tests.e2e.cluster import PROMPT, Cluster
from tests.e2e.server import wait_for

FULL = 48  # tokens of PROMPT's full pages


class Sharing(Cluster):
    """Engines with one directory for L3, which write there only when they stop."""

    def flags(self, id: str) -> tuple[str, ...]:
        store = str(self.directory / "store")
        return (*super().flags(id), "--l3-dir", store, "--l3-owner", id, "--write-policy", "write-back")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Sharing(tmp_path)
    with cluster.stack:
        for id in cluster.servers:
            cluster.router.wait_state(id, "serving")
        yield cluster


def _ask(cluster: Cluster, salt: str, tokens: int = 4) -> tuple[str, list[int], dict[str, Any]]:
    """Who answered through the router, the tokens, and the usage."""
    request = pb.GenerateRequest(
        token_ids=ids(PROMPT), sampling=greedy(tokens, ignore_eos=True), cache_salt=salt
    )
    call = cluster.router.generation.Generate(request, timeout=60)
    answer = collect(call)
    return dict(call.initial_metadata())["jkv-engine"], answer.choices[0].token_ids, answer.usage


def test_a_drained_engine_hands_its_pages_and_its_requests_over(cluster: Cluster) -> None:
    served, tokens, usage = _ask(cluster, "warm")
    assert usage["cached_tokens"] == 0
    (other,) = cluster.servers.keys() - {served}
    leaving = cluster.servers[served]
    draining = threading.Event()

    def keep_asking(number: int) -> None:
        """Until the engine has gone, requests find one that serves."""
        count = 0
        while not draining.is_set() or count < 3:
            _ask(cluster, f"busy {number} {count}", 20)
            count += draining.is_set()

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(keep_asking, number) for number in range(4)]
        time.sleep(0.5)
        leaving.terminate()
        assert leaving.process.wait(60) == 0
        draining.set()
        for future in asking:
            future.result(60)
    assert _refused(cluster) == []

    wait_for(lambda: cluster.router.engine(other).pages["l3"], "the other engine finds the pages", 30)
    again, same, usage = _ask(cluster, "warm")
    assert again == other
    assert same == tokens
    assert usage["cached_by_tier"]["l3"] == FULL


def _refused(cluster: Cluster) -> list[str]:
    """Requests that the router sent to an engine which took none any more."""
    return re.findall(r"WARNING .*request .* on .*", cluster.router.output)
