"""Real engines behind a real router, with a real etcd that they reach through a relay."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from tests.e2e.calls import collect, greedy, ids
from tests.e2e.server import TINY, Server, environment, serving, wait_for
from tests.router.etcd_server import etcd_server
from tests.router.relay import relay_in_thread

PAGE = 8
FLAGS = (
    f"--model {TINY} --page-size {PAGE} --max-num-seqs 4 --max-batched-tokens 64 --max-mixed-tokens 16 "
    "--max-model-len 1024 --batch-invariant --l1-pages 256 --served-model-name tiny "
    "--load-policy always"
).split()
LONG = 900  # tokens, which take long enough to kill their engine meanwhile
PROMPT = [3 + i % 97 for i in range(50)]


class RouterProcess:
    """`python -m jkv.router` on a free port, which writes into a file of `directory`."""

    def __init__(self, directory: Path, *flags: str) -> None:
        directory.mkdir(exist_ok=True)
        self._output = directory / "output"
        with self._output.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jkv.router", "--grpc-port", "0", "--metrics-port", "0", *flags],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment(),
            )
        self.address = self.find(r"^listening on (\S+), waiting", 30)
        self.metrics_address = self.find(r"metrics at http://([^/]+)/metrics", 30)
        self.channel = grpc.insecure_channel(self.address)
        self.generation: Any = pb_grpc.GenerationStub(self.channel)
        self.router: Any = pb_grpc.RouterStub(self.channel)

    @property
    def output(self) -> str:
        return self._output.read_text()

    def status(self) -> pb.RouterStatusResponse:
        return self.router.Status(pb.RouterStatusRequest(), timeout=10)

    def engine(self, id: str) -> pb.EngineStatus:
        """An empty one, until the engine has said its id."""
        return next((engine for engine in self.status().engines if engine.id == id), pb.EngineStatus())

    def wait_state(self, id: str, state: str, timeout: float = 30) -> None:
        wait_for(lambda: self.engine(id).state == state, f"engine {id} is {state}", timeout)

    @property
    def membership(self) -> str:
        return self.status().membership

    def explain(self, salt: str, prompt: Sequence[int] = PROMPT) -> pb.ExplainResponse:
        prefix = pb.Prefix(token_ids=ids(prompt), cache_salt=salt)
        return self.router.Explain(pb.ExplainRequest(prefix=prefix), timeout=10)

    def kill(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()

    def find(self, pattern: str, timeout: float) -> str:
        def look() -> re.Match[str] | None:
            return re.search(pattern, self.output, re.MULTILINE)

        return wait_for(look, f"{pattern!r} in the router's output", timeout)[1]


class Cluster:
    """Engines, each with a disk tier of its own, and a router; all of them reach etcd through the relay."""

    def __init__(self, directory: Path, ids: Sequence[str] = ("one", "two")) -> None:
        self.directory, self.stack = directory, ExitStack()
        self.servers: dict[str, Server] = {}
        self.etcd = self.stack.enter_context(etcd_server(directory / "etcd"))
        self.relay = self.stack.enter_context(relay_in_thread(self.etcd.address))
        self.start_router()
        for id in ids:
            self.start(id)

    def start_router(self) -> None:
        self.router = self.another_router("router", "--suspect-after", "2")

    def another_router(self, name: str, *flags: str) -> RouterProcess:
        router = RouterProcess(self.directory / name, "--etcd", self.relay.address, *flags)
        self.stack.callback(router.kill)
        return router

    def start(self, id: str, port: str = "0") -> None:
        (self.directory / id).mkdir(exist_ok=True)
        flags = (*self.flags(id), "--grpc-port", port)
        self.servers[id] = self.stack.enter_context(serving(self.directory / id, *flags))

    def restart(self, id: str) -> None:
        """Another process at the address of one that has ended."""
        self.start(id, self.servers[id].address.rpartition(":")[2])

    def flags(self, id: str) -> tuple[str, ...]:
        store = str(self.directory / id / "l3")
        return (
            *FLAGS,
            "--instance-id",
            id,
            "--etcd",
            self.relay.address,
            "--l3-dir",
            store,
            "--metrics-port",
            "0",
        )

    def ask(self, salt: str, tokens: int = 3, prompt: Sequence[int] = PROMPT) -> tuple[str, Any]:
        """A request through the router, which must succeed and soon: who answered, and the usage."""
        call = self.router.generation.Generate(request(tokens, salt, prompt), timeout=30)
        answer = collect(call)
        assert answer.choices[0].finish_reason == "length"
        return dict(call.initial_metadata())["jkv-engine"], answer.usage

    def stop(self, id: str, number: signal.Signals) -> None:
        os.kill(self.servers[id].process.pid, number)

    def agrees(self, id: str, router: RouterProcess | None = None) -> bool:
        """Whether the router, or another one, believes of an engine what it holds."""
        replica: Any = pb_grpc.ReplicaStub(self.servers[id].channel)
        held = replica.Digest(pb.DigestRequest(), timeout=20)
        believed = (router or self.router).router.Digest(pb.RouterDigestRequest(engine=id), timeout=20)
        tiers = [sorted((one.tier, one.pages, one.checksum) for one in d.tiers) for d in (held, believed)]
        return held.incarnation == believed.incarnation and tiers[0] == tiers[1]

    def drain(self, id: str) -> None:
        """Returns once an engine's L3 has all that it has computed."""
        cache: Any = pb_grpc.CacheStub(self.servers[id].channel)
        cache.Drain(pb.DrainRequest(), timeout=30)

    def wait_agreed(self, router: RouterProcess | None = None) -> None:
        """The index becomes what all engines hold, in all tiers."""
        for id in self.servers:
            wait_for(lambda id=id: self.agrees(id, router), f"the router knows what {id} has", 30)


def request(tokens: int, salt: str, prompt: Sequence[int] = PROMPT, **fields: Any) -> pb.GenerateRequest:
    """Greedy unless `fields`, of Sampling, say otherwise."""
    sampling = greedy(tokens, ignore_eos=True, logprobs=True)
    sampling.MergeFrom(pb.Sampling(**fields))
    return pb.GenerateRequest(token_ids=ids(prompt), sampling=sampling, cache_salt=salt)
