"""The demo's end: two engines and a router, and a prefix that outlives the engine which computed it."""

from __future__ import annotations

import http.client
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
from demo_server import DemoError, Process, Server, redraw, running, serving, status

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from jkv.client.router_show import explain_document, explain_lines
from jkv.client.rpc import Generation, connect
from jkv.engine.host_memory import host_available
from jkv.terminal import aligned

T = TypeVar("T")

_TIERS = ("l1", "l2", "l3", "peer")
_HEAD = ("", "engine", *_TIERS, "next token after")
_ETCD_S, _WAIT_S = 120.0, 60.0
_TOKENS, _KILL_AFTER = 48, 16
_ENGINE_GIB = 4.5  # what one takes, measured with the default model and flags


@dataclass(frozen=True, kw_only=True)
class Answer:
    """`engines` are those that gave it, in order; `pause` is the longest wait between chunks, in seconds."""

    result: Generation
    engines: tuple[str, ...]
    pause: float

    @property
    def token_ids(self) -> list[int]:
        return self.result.choices[0].token_ids

    def cells(self, label: str) -> tuple[str, ...]:
        assert self.result.ttft is not None, "an answer has tokens"
        return _cells(label, self.engines[0], self.result.usage["cached_by_tier"], self.result.ttft)


@contextmanager
def private_etcd(directory: Path) -> Iterator[str | None]:
    """The address of an etcd, or None, which is said, where there is none to be had."""
    port = _free_port()
    script = Path(__file__).parent / "etcd"
    command = [str(script), "--data-dir", str(directory), "--port", str(port)]
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    status("starting an etcd, which is installed first where there is none")
    with running(Process("etcd", command, PATH=path)) as process:
        try:
            _wait_for(lambda: _is_healthy(process, port), "etcd serves", _ETCD_S)
        except DemoError as error:
            redraw("")
            print(f"No etcd, so the router gets a fixed list of engines: {error}")
            address = None
        else:
            redraw("")
            address = f"127.0.0.1:{port}"
            print(f"etcd at {address}, where engines and routers find each other")
        yield address


def joining(id: str, etcd: str | None) -> tuple[str, ...]:
    """The flags of an engine of the cluster."""
    return ("--instance-id", id, *(("--etcd", etcd) if etcd else ()))


def show_cluster(one: Server, etcd: str | None, flags: Sequence[str], prompt: str) -> None:
    """Warms a prompt on engine one, asks for it through a router, kills its engine, and asks again."""
    print("\n5. A cluster: a second engine with the same L3 folder, and a router in front of both.")
    if (available := host_available() / 2**30) < _ENGINE_GIB:
        print(f"Left out: another engine needs {_ENGINE_GIB} GiB of memory, {available:.1f} GiB are free.")
        return
    with ExitStack() as stack:
        two = stack.enter_context(serving("Engine two", *flags, *joining("two", etcd)))
        engines = {"one": one, "two": two}
        members = ("--etcd", etcd) if etcd else ("--engines", f"{one.address},{two.address}")
        router = stack.enter_context(serving("The router", *members, module="jkv.router"))
        channel = stack.enter_context(connect(router.address))
        _wait_for(lambda: _all_serve(channel, engines), "the router knows both engines")
        rows = [_warm(one, prompt).cells("a new prompt, asked of one itself")]
        _explain(channel, prompt)
        rows += _kill_under_an_answer(channel, engines, prompt)
        print()
        for line in aligned([_HEAD, *rows]):
            print(f"  {line}")


def _warm(engine: Server, prompt: str) -> Answer:
    """Has the engine compute the prompt, without the router, and write its pages to L3."""
    status("asking engine one for a prompt that no engine has seen")
    with connect(engine.address) as channel:
        cache: Any = pb_grpc.CacheStub(channel)
        cache.Stats(pb.CacheStatsRequest())  # connects, so that TTFT does not count it
        answer = _ask(channel, prompt, 8, lambda *_: None)
        cache.Drain(pb.DrainRequest())
    return answer


def _explain(channel: grpc.Channel, prompt: str) -> None:
    """What `jkv route explain` shows, once engine two has seen what engine one wrote."""
    router: Any = pb_grpc.RouterStub(channel)
    request = pb.ExplainRequest(prefix=pb.Prefix(prompt=prompt))

    def both_have_it() -> pb.ExplainResponse | None:
        answer = router.Explain(request)
        tokens = [one.matched.l1 + one.matched.l2 + one.matched.l3 for one in answer.engines]
        return answer if min(tokens) == max(tokens) > 0 else None

    answer = _wait_for(both_have_it, "both engines have the prompt, one of them from L3")
    redraw("")
    print("Engine one has computed a prompt. What jkv route explain says of it now, in tokens by tier:")
    for line in explain_lines(explain_document(answer)):
        print(f"  {line}")


def _kill_under_an_answer(
    channel: grpc.Channel, engines: dict[str, Server], prompt: str
) -> list[tuple[str, ...]]:
    """Rows of the table; that of the survivor says what it took from its cache to go on."""
    before = {id: _hits(server) for id, server in engines.items()}
    tokens, killed = 0, ""

    def show(chunk: pb.GenerateChunk, engine: str) -> None:
        nonlocal tokens, killed
        print(chunk.text, end="", flush=True)
        tokens += len(chunk.token_ids)
        if tokens >= _KILL_AFTER and not killed:
            killed = engine
            engines[engine].process.kill()
            print(f" [engine {engine} is killed] ", end="", flush=True)

    print("\nThe same prompt through the router. In mid-answer, the engine that gives it is killed.")
    print("> In short, the keeper", end="")
    answer = _ask(channel, prompt, _TOKENS, show)
    if len(answer.engines) != 2:
        raise DemoError(f"the answer came from {answer.engines}, not from two engines")
    survivor = answer.engines[1]
    hits = {tier: count - before[survivor][tier] for tier, count in _hits(engines[survivor]).items()}
    again = _ask(channel, prompt, _TOKENS, lambda *_: None)
    same = again.token_ids == answer.token_ids
    print(f"\nAsked again, the answer is {'the same' if same else 'NOT the same'}, token by token.")
    return [
        answer.cells("the same through the router"),
        _cells("that engine killed, the answer goes on", survivor, hits, answer.pause),
        again.cells("the same through the router again"),
    ]


def _ask(
    channel: grpc.Channel, prompt: str, tokens: int, show: Callable[[pb.GenerateChunk, str], None]
) -> Answer:
    """`show` gets each chunk, and which engine the router had chosen."""
    sampling = pb.Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)
    stub: Any = pb_grpc.GenerationStub(channel)
    started = last = time.monotonic()
    call = stub.Generate(pb.GenerateRequest(prompt=prompt, sampling=sampling))
    result, pause = Generation(), 0.0
    for chunk in call:
        now = time.monotonic()
        if result.ttft is None:
            result.ttft = now - started
        else:
            pause = max(pause, now - last)
        last = now
        result.add(chunk)
        show(chunk, _engines(call.initial_metadata())[0])
    return Answer(result=result, engines=_engines(call.trailing_metadata()), pause=pause)


def _engines(metadata: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """What a router says; an engine does not name itself."""
    return tuple(value for key, value in metadata if key == "jkv-engine") or ("one",)


def _cells(label: str, engine: str, tokens: Mapping[str, int], seconds: float) -> tuple[str, ...]:
    return (label, engine, *(str(tokens[tier]) for tier in _TIERS), f"{seconds * 1000:.0f} ms")


def _hits(server: Server) -> dict[str, int]:
    """Prompt tokens that the engine has taken from each tier so far."""
    with connect(server.address) as channel:
        cache: Any = pb_grpc.CacheStub(channel)
        stats = cache.Stats(pb.CacheStatsRequest())
    return dict.fromkeys(_TIERS, 0) | {one.tier: one.hit_tokens for one in stats.tiers}


def _all_serve(channel: grpc.Channel, engines: Iterable[str]) -> bool:
    """Whether the router sends requests to all of them, and is done with its self-tests."""
    router: Any = pb_grpc.RouterStub(channel)
    answer = router.Status(pb.RouterStatusRequest())
    done = {one.id for one in answer.engines if one.state == "serving" and one.self_test != "pending"}
    return done == set(engines)


def _wait_for(look: Callable[[], T | None], what: str, seconds: float = _WAIT_S) -> T:
    """The first result that is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.1)
    raise DemoError(f"not within {seconds:g} s: {what}")


def _is_healthy(process: Process, port: int) -> bool:
    if not process.is_running:
        raise process.ended()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/health")
        return b"true" in connection.getresponse().read()
    except OSError:
        return False
    finally:
        connection.close()


def _free_port() -> int:
    """One of which the next is free as well, for now."""
    while True:
        with socket.socket() as one, socket.socket() as next_one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                next_one.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
