"""Real engines, a real router and a real etcd, and what happens when engines die under a request."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from tests.e2e.calls import collect, greedy, ids
from tests.e2e.server import TINY, Server, environment, run, serving, wait_for
from tests.router.etcd_server import etcd_server

PAGE = 8
FLAGS = (
    f"--model {TINY} --page-size {PAGE} --max-num-seqs 4 --max-batched-tokens 64 --max-mixed-tokens 16 "
    "--max-model-len 1024 --batch-invariant --l1-pages 256 --served-model-name tiny "
    "--load-policy always"
).split()
LONG = 900  # tokens, which take long enough to kill their engine meanwhile
PROMPT = [3 + i % 97 for i in range(50)]


class RouterProcess:
    """`python -m jkv.router` on a free port."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self._output = directory / "router"
        with self._output.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jkv.router", "--grpc-port", "0", *flags],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment(),
            )
        self.address = self._find(r"^listening on (\S+), waiting", 30)
        self.channel = grpc.insecure_channel(self.address)
        self.generation: Any = pb_grpc.GenerationStub(self.channel)
        self.router: Any = pb_grpc.RouterStub(self.channel)

    @property
    def output(self) -> str:
        return self._output.read_text()

    def engine(self, id: str) -> pb.EngineStatus:
        """An empty one, until the engine has said its id."""
        answer = self.router.Status(pb.RouterStatusRequest(), timeout=10)
        return next((engine for engine in answer.engines if engine.id == id), pb.EngineStatus())

    def wait_state(self, id: str, state: str, timeout: float = 30) -> None:
        wait_for(lambda: self.engine(id).state == state, f"engine {id} is {state}", timeout)

    def kill(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()

    def _find(self, pattern: str, timeout: float) -> str:
        def look() -> re.Match[str] | None:
            return re.search(pattern, self.output, re.MULTILINE)

        return wait_for(look, f"{pattern!r} in the router's output", timeout)[1]


class Cluster:
    def __init__(self, directory: Path) -> None:
        self.directory, self.stack = directory, ExitStack()
        self.servers: dict[str, Server] = {}
        self.etcd = self.stack.enter_context(etcd_server(directory / "etcd"))
        self.start_router()
        for id in ("one", "two"):
            self.start(id)

    def start_router(self) -> None:
        self.router = RouterProcess(self.directory, "--etcd", self.etcd.address, "--suspect-after", "2")
        self.stack.callback(self.router.kill)

    def start(self, id: str, port: str = "0") -> None:
        (self.directory / id).mkdir(exist_ok=True)
        flags = (*self.flags(id), "--grpc-port", port)
        self.servers[id] = self.stack.enter_context(serving(self.directory / id, *flags))

    def flags(self, id: str) -> tuple[str, ...]:
        return (*FLAGS, "--instance-id", id, "--etcd", self.etcd.address)

    def stop(self, id: str, number: signal.Signals) -> None:
        os.kill(self.servers[id].process.pid, number)

    def agrees(self, id: str, router: RouterProcess | None = None) -> bool:
        """Whether the router, or another one, believes of an engine what it holds."""
        replica: Any = pb_grpc.ReplicaStub(self.servers[id].channel)
        held = replica.Digest(pb.DigestRequest(), timeout=20)
        believed = (router or self.router).router.Digest(pb.RouterDigestRequest(engine=id), timeout=20)
        tiers = [sorted((one.tier, one.pages, one.checksum) for one in d.tiers) for d in (held, believed)]
        return held.incarnation == believed.incarnation and tiers[0] == tiers[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    with cluster.stack:
        yield cluster


@pytest.fixture(autouse=True)
def both_serve(cluster: Cluster) -> None:
    """Start again, at its address, what a test has killed."""
    for id, server in list(cluster.servers.items()):
        if server.process.poll() is not None:
            cluster.start(id, server.address.rpartition(":")[2])
        cluster.router.wait_state(id, "serving")
        wait_for(lambda id=id: cluster.router.engine(id).self_test != "pending", f"self-test of {id}", 60)


def _request(tokens: int, salt: str, **fields: Any) -> pb.GenerateRequest:
    sampling = greedy(tokens, ignore_eos=True, logprobs=True)
    sampling.MergeFrom(pb.Sampling(**fields))
    return pb.GenerateRequest(token_ids=ids(PROMPT), sampling=sampling, cache_salt=salt)


def test_what_an_engine_has_computed_is_found_through_the_router(cluster: Cluster) -> None:
    for id in cluster.servers:
        assert cluster.router.engine(id).self_test == "passed"
    first = cluster.router.generation.Generate(_request(4, "found"))
    collect(first)
    served = dict(first.initial_metadata())["jkv-engine"]
    for id in cluster.servers:
        wait_for(lambda id=id: cluster.agrees(id), f"the router knows what {id} has", 20)
    for _ in range(4):
        again = cluster.router.generation.Generate(_request(4, "found"))
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
    request = _request(LONG, salt, **sampling)
    (whole,) = collect(cluster.servers["two"].stub.Generate(request)).choices.values()
    request.cache_salt += "again"
    call = cluster.router.generation.Generate(request, timeout=60)
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
    calls = [cluster.router.generation.Generate(_request(30, f"many{i}"), timeout=60) for i in range(12)]
    cluster.stop(victim, signal.SIGKILL)
    for call in calls:
        assert collect(call).choices[0].finish_reason == "length"
    cluster.router.wait_state(victim, "connecting")
    wait_for(lambda: not any(cluster.router.engine(victim).pages.values()), "its memory is forgotten", 10)


def test_an_engine_fetches_what_another_one_has(cluster: Cluster) -> None:
    (cluster.directory / "turns").mkdir()
    flags = ("--etcd", cluster.etcd.address, "--policy", "round-robin")
    turns = RouterProcess(cluster.directory / "turns", *flags)
    try:
        for id in cluster.servers:
            turns.wait_state(id, "serving")
        served = {}
        for _ in range(2):
            call = turns.generation.Generate(_request(4, "fetched"), timeout=20)
            usage = collect(call).usage
            served[dict(call.initial_metadata())["jkv-engine"]] = usage["cached_by_tier"]["peer"]
            for id in cluster.servers:
                wait_for(lambda id=id: cluster.agrees(id, turns), f"the router knows what {id} has", 20)
        assert sorted(served.values()) == [0, 48]
        assert sorted(served) == ["one", "two"]
    finally:
        turns.kill()


def _asks(cluster: Cluster, salt: str) -> None:
    """Requests while something is wrong are answered, and at once."""
    for number in range(4):
        call = cluster.router.generation.Generate(_request(3, f"{salt}{number}"), timeout=20)
        assert collect(call).choices[0].finish_reason == "length"


def _membership(cluster: Cluster) -> str:
    return cluster.router.router.Status(pb.RouterStatusRequest(), timeout=10).membership


@pytest.mark.parametrize("fault", ["killed", "frozen", "emptied"])
def test_nobody_misses_etcd(cluster: Cluster, fault: str) -> None:
    if fault == "frozen":
        cluster.etcd.stop()
    else:
        cluster.etcd.kill()
    _asks(cluster, f"without etcd {fault}")
    wait_for(lambda: _membership(cluster).startswith("frozen: "), "the router notices", 20)
    _asks(cluster, f"frozen {fault}")
    if fault == "frozen":
        cluster.etcd.resume()
    else:
        if fault == "emptied":
            cluster.etcd.empty()
        cluster.etcd.start()
    wait_for(lambda: _membership(cluster) == "etcd", "the router follows etcd again", 30)
    _asks(cluster, f"again {fault}")
    for id in cluster.servers:
        assert cluster.router.engine(id).state == "serving"
        wait_for(lambda id=id: cluster.agrees(id), f"the router knows what {id} has", 20)


def test_a_router_that_was_killed_is_back_in_seconds(cluster: Cluster) -> None:
    before = {id: cluster.router.engine(id).pages for id in cluster.servers}
    cluster.router.kill()
    started = time.monotonic()
    cluster.start_router()
    for id in cluster.servers:
        cluster.router.wait_state(id, "serving", 10)
    assert time.monotonic() - started < 10  # 5 on an idle machine
    for id in cluster.servers:
        wait_for(lambda id=id: cluster.agrees(id), f"the router knows what {id} has", 20)
        assert cluster.router.engine(id).pages["l1"] >= before[id]["l1"]
