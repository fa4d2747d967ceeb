"""One engine over two processes, as on two hosts."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from jkv.api import jkv_pb2 as pb
from jkv.api import jkv_pb2_grpc as pb_grpc
from tests.e2e.calls import collect, greedy, ids
from tests.e2e.server import TINY, Server, environment, serving
from tests.engine.oracle import TinyCase, tiny_case

_FLAGS = (
    f"--model {TINY} --page-size 16 --max-num-seqs 1 --max-batched-tokens 4 --max-mixed-tokens 4 "
    "--max-model-len 256 --l1-pages 64 --l2-gib 0.1 --l3-gib 0.1 --load-policy always"
).split()
_STOP_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Process 0, which serves, and process 1."""

    first: Server
    second: subprocess.Popen[bytes]
    l3: Path


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    l3 = tmp_path / "l3"
    flags = (*_FLAGS, "--l3-dir", str(l3), "--tp", "2", "--num-processes", "2", "--coordinator", coordinator)
    with ExitStack() as stack:
        log = stack.enter_context((tmp_path / "second").open("wb"))
        second = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "jkv.serve", *flags, "--process-id", "1"],
                stderr=log,
                env=environment(),
            )
        )
        stack.callback(second.kill)
        yield Pair(first=stack.enter_context(serving(tmp_path, *flags)), second=second, l3=l3)


def _ask(server: Server, case: TinyCase) -> dict[str, int]:
    """Asks for a case's golden tokens; returns how many of the prompt's came from each tier."""
    count = case.certain
    request = pb.GenerateRequest(
        token_ids=ids(list(case.prompt_ids)), sampling=greedy(count, ignore_eos=True)
    )
    answer = collect(server.stub.Generate(request))
    assert tuple(answer.choices[0].token_ids) == case.greedy_ids[:count]
    return {tier: n for tier, n in answer.usage["cached_by_tier"].items() if n}


def test_two_processes_serve_as_one_and_end_together(pair: Pair) -> None:
    case = tiny_case("llama3", 2)
    cache = pb_grpc.CacheStub(pair.first.channel)
    full = min(len(case.prompt_ids) // 16 * 16, len(case.prompt_ids) - 1)
    assert _ask(pair.first, case) == {}
    assert _ask(pair.first, case) == {"l1": full}
    cache.Drain(pb.DrainRequest())
    cache.Flush(pb.FlushRequest(tiers=["l1"]))
    assert _ask(pair.first, case) == {"l2": full}
    cache.Flush(pb.FlushRequest(tiers=["l1", "l2"]))
    assert _ask(pair.first, case) == {"l3": full}
    pair.second.terminate()  # as process 0, it goes on until that one has drained
    pair.first.terminate()
    assert pair.first.process.wait(_STOP_S) == 0
    assert pair.second.wait(_STOP_S) == 0


@pytest.mark.full
def test_what_two_processes_wrote_one_reads(pair: Pair, tmp_path: Path) -> None:
    cases = [tiny_case("llama3", number) for number in (2, 4)]
    for case in cases:
        assert _ask(pair.first, case) == {}
    pair.first.terminate()
    assert pair.first.process.wait(_STOP_S) == 0
    alone = tmp_path / "alone"
    alone.mkdir()
    with serving(alone, *_FLAGS, "--l3-dir", str(pair.l3)) as server:
        assert [_ask(server, case) for case in cases] == [{"l3": 63}, {"l3": 128}]


@pytest.mark.full
def test_without_one_of_its_processes_the_engine_ends(pair: Pair) -> None:
    pair.second.kill()
    with pytest.raises(grpc.RpcError):
        _ask(pair.first, tiny_case("llama3", 2))
    assert pair.first.process.wait(_STOP_S) != 0


@pytest.mark.full
def test_without_process_0_the_others_end(pair: Pair) -> None:
    pair.first.kill()
    assert pair.second.wait(_STOP_S) != 0
