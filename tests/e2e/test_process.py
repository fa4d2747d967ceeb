"""The server process: its start, its output, its end, and starts that must fail."""

from __future__ import annotations

import itertools
import json
import os
import pty
import re
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jkv.api import jkv_pb2 as pb
from jkv.api.grpc_server import SERVICE
from tests.e2e.calls import collect, greedy, ids, refusal
from tests.e2e.server import NOT_SERVING, SERVING, TINY, Server, run, serving

FLAGS = ("--max-num-seqs", "4", "--max-batched-tokens", "32", "--max-mixed-tokens", "16", "--l1-pages", "80")


def expected(case: int) -> tuple[list[int], list[int]]:
    """A prompt of the tiny checkpoint, and its greedy tokens up to the first that rounding may decide."""
    with np.load(TINY / "expected.npz") as arrays:
        margins = arrays[f"margin{case}"]
        certain = next((i for i, margin in enumerate(margins) if margin < 0.005), len(margins))
        return arrays[f"ids{case}"].tolist(), arrays[f"greedy{case}"].tolist()[:certain]


def answers_as_expected(server: Server) -> None:
    for case in range(2):
        prompt, tokens = expected(case)
        sampling = greedy(len(tokens), ignore_eos=True)
        answer = collect(server.stub.Generate(pb.GenerateRequest(token_ids=ids(prompt), sampling=sampling)))
        assert answer.choices[0].token_ids == tokens
        assert answer.choices[0].text == ""


def long_streams(server: Server) -> list[Iterator[pb.GenerateChunk]]:
    """Streams of requests that take seconds, all of them decoding."""
    sampling = greedy(900, ignore_eos=True)
    calls = [
        server.stub.Generate(pb.GenerateRequest(token_ids=ids([5 + i]), sampling=sampling)) for i in range(4)
    ]
    return [itertools.chain([next(call)], call) for call in calls]


def cache_files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.name.endswith("-cache")}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compile cache of this module's own."""
    return tmp_path_factory.mktemp("xla")


def test_first_start_then_a_second_from_the_compile_cache(tmp_path: Path, cache: Path) -> None:
    directories = [tmp_path / name for name in ("first", "second")]
    for directory in directories:
        directory.mkdir()

    first = Server(directories[0], "--model", str(TINY), *FLAGS, JAX_COMPILATION_CACHE_DIR=str(cache))
    try:
        assert [first.health(), first.health(SERVICE)] == [NOT_SERVING] * 2
        asked = run("jkv.client", "health", "--address", first.address)
        assert (asked.returncode, asked.stdout) == (1, "NOT_SERVING\n")
        error = refusal(first.stub.Generate(pb.GenerateRequest(token_ids=ids([1]))))
        assert (error.code(), error.details()) == (
            grpc.StatusCode.UNAVAILABLE,
            "the model is still loading",
        )
        first.wait_ready()
        assert [first.health(), first.health(SERVICE)] == [SERVING] * 2
        answers_as_expected(first)
        sigterm_drains(first)
    finally:
        first.kill()

    compiled = cache_files(cache)
    assert len(compiled) > 10
    flags = ("--model", str(TINY), *FLAGS)
    with serving(directories[1], *flags, JAX_COMPILATION_CACHE_DIR=str(cache)) as second:
        answers_as_expected(second)
        assert cache_files(cache) == compiled
        a_second_sigterm_exits_at_once(second)


def sigterm_drains(server: Server) -> None:
    calls = long_streams(server)
    server.terminate()
    server.wait_logged("draining for at most 30 s")
    error = refusal(server.stub.Generate(pb.GenerateRequest(token_ids=ids([1]))))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in error.details()
    for call in calls:
        answer = collect(call).choices[0]
        assert (len(answer.token_ids), answer.finish_reason) == (900, "length")
    assert server.process.wait(20) == 0


def a_second_sigterm_exits_at_once(server: Server) -> None:
    calls = long_streams(server)
    server.terminate()
    server.wait_logged("draining for at most 30 s")
    server.terminate()
    assert server.process.wait(2) == 128 + signal.SIGTERM
    for call in calls:
        assert refusal(call).code() is grpc.StatusCode.UNAVAILABLE


def test_a_flag_wins_over_the_config_file(tiny: Server) -> None:
    (card,) = tiny.stub.ListModels(pb.ListModelsRequest()).models
    assert (card.name, card.page_size, card.max_model_len) == ("from-file", 16, 512)
    assert (card.vocab_size, card.has_tokenizer) == (512, False)


def test_reflection_lists_the_services(tiny: Server) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(tiny.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]))
    names = {service.name for service in answer.list_services_response.service}
    assert names >= {"jkv.v1.Generation", "grpc.health.v1.Health"}


def test_the_log_is_short_plain_lines(tiny: Server) -> None:
    """A start in a pipe: where it listens and that it is ready on stdout, the stages on stderr."""
    assert tiny.stdout.splitlines() == [
        f"listening on {tiny.address}, loading {TINY}",
        f"ready: from-file on {tiny.address}",
    ]
    lines = [line for line in tiny.stderr.splitlines() if " jkv.serve: " in line]
    assert len(lines) < 20
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \S+ INFO jkv.serve: ", line) for line in lines)
    stages = [line.split(" jkv.serve: ")[1] for line in lines]
    assert any(stage.startswith("loaded weights in ") for stage in stages)
    assert re.match(r"compiled \d+ programs in ", stages[-1])
    assert "\x1b" not in tiny.stderr


def test_a_converted_checkpoint_serves_the_same_tokens_and_a_terminal_sees_progress(
    tmp_path: Path, cache: Path
) -> None:
    out = tmp_path / "converted"
    done = run("jkv.convert", "--model", str(TINY), "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"wrote {out} in ")
    variables = {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    with (
        terminal() as (end, shown),
        serving(tmp_path, "--model", str(out), *FLAGS, stderr=end, **variables) as server,
    ):
        answers_as_expected(server)
    screen = [line.split("\r\x1b[K")[-1] for line in "".join(shown).replace("\r\n", "\n").split("\n")]
    assert any(line.startswith("loaded weights in ") for line in screen)
    compiling = [line for line in screen if line.startswith("compiled ")]
    assert len(compiling) == 1, "one line, overwritten"
    assert re.fullmatch(r"compiled \d+ programs in \d+\.\d s", compiling[0])
    assert "".join(shown).count("\r\x1b[Kcompiled ") > 5


@contextmanager
def terminal() -> Iterator[tuple[int, list[str]]]:
    """A terminal for a process to write to, and what it has written; printed too, for a test that fails."""
    ours, theirs = pty.openpty()
    shown: list[str] = []

    def read() -> None:
        with suppress(OSError):  # when the last writer has closed it
            while data := os.read(ours, 65536):
                shown.append(data.decode())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield theirs, shown
    finally:
        os.close(theirs)
        reader.join(10)
        os.close(ours)
        print("".join(shown))


def fails(status: int, *words: str, flags: tuple[str, ...]) -> None:
    """The server says why in one line of its own, and exits."""
    done = run("jkv.serve", "--log-level", "error", *flags)
    assert done.returncode == status
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--page-size 48", ["--page-size 48", "power of two"]),
        ("--grpc-port 70000", ["--grpc-port 70000", "65535"]),
        ("--max-num-seqs many", ["--max-num-seqs many", "integer"]),
        ("--l1-gib 1 --l1-pages 5", ["--l1-gib and --l1-pages"]),
        ("--config /no/such.toml", ["--config /no/such.toml", "No such file"]),
        ("--host no.such.host.invalid --grpc-port 0", ["--host no.such.host.invalid"]),
        ("--model no-such-model --grpc-port 0", ["--model 'no-such-model'", "smollm2-135m-instruct"]),
        ("--model {tiny} --grpc-port 0 --l1-gib 5000", ["--l1-gib 5000", "bytes available"]),
        ("--model {tiny} --grpc-port 0 --max-model-len 1025", ["--max-model-len 1025", "1024"]),
    ],
)
def test_unusable_flags(flags: str, words: list[str]) -> None:
    fails(2, *words, flags=tuple(flags.format(tiny=TINY).split()))


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        fails(2, f"--grpc-port {port}", "in use", flags=("--grpc-port", port))


def test_an_unsupported_checkpoint(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    config = json.loads((TINY / "config.json").read_text())
    config |= {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    fails(1, "Phi3ForCausalLM", "LlamaForCausalLM", flags=("--model", str(tmp_path), "--grpc-port", "0"))


def test_help_names_every_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # argparse wraps words at their hyphens
    done = run("jkv.serve", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "default: smollm2-135m-instruct" in done.stdout
    assert done.stdout.count("(default:") > 15
