"""The command-line client against the real service with a scripted engine."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

from jkv.client import main
from jkv.client.rpc import Choice, Generation
from jkv.client.show import usage_line
from jkv.engine.request import EngineRequest, Logprob, TokenOutput
from jkv.errors import OverloadedError
from tests.api.doubles import EOS, echo
from tests.client.server import Capture, Server, feed_stdin, run_client, running


def test_generate_streams_text_and_reports_usage(server: Server, capsys: Capture) -> None:
    assert run_client(server, "generate", "héllo wörld") == 0
    out, err = capsys.readouterr()
    assert out == "héllo wörld\n"
    assert err.startswith("prompt 13 tokens (8 cached: l1 8), completion 14 tokens (stop), TTFT ")
    assert err.endswith(" tokens/s\n")
    assert err.count("\n") == 1


def test_generate_reads_stdin_and_token_ids(
    server: Server, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed_stdin(monkeypatch, "from a pipé\n".encode())
    assert run_client(server, "generate", "-") == 0
    assert capsys.readouterr().out == "from a pipé\n\n"
    assert run_client(server, "generate", "--token-ids", "104, 105") == 0
    assert capsys.readouterr().out == "hi\n"
    assert server.request.prompt_ids == (104, 105)


def test_json_is_one_object(server: Server, capsys: Capture) -> None:
    def script(request: EngineRequest) -> list[TokenOutput]:
        top = ((104, -0.5), (7, -1.5))
        first = TokenOutput(token_ids=(104,), logprobs=(Logprob(104, -0.5, top),))
        return [first, *echo(request)[1:]]

    server.generator.script = script
    assert run_client(server, "generate", "hi", "--json", "--logprobs", "--top-logprobs", "2") == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert (out.count("\n"), err) == (1, "")
    (choice,) = document["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("hi", [*b"hi", EOS], "stop")
    assert choice["logprobs"] == [
        {
            "id": 104,
            "logprob": -0.5,
            "top": [{"id": 104, "logprob": -0.5, "top": []}, {"id": 7, "logprob": -1.5, "top": []}],
        }
    ]
    assert document["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "cached_tokens": 0,
        "cached_by_tier": {"l1": 0, "l2": 0, "l3": 0, "peer": 0},
    }
    assert document["seconds"] >= document["ttft_s"] > 0


def test_every_flag_reaches_the_engine(server: Server) -> None:
    argv = shlex.split(
        "--max-tokens 5 --temperature 0.5 --top-p 0.25 --top-k 3 --min-p 0.125 --seed 9 --stop-token-ids 1 "
        "--stop-token-ids 2 --repetition-penalty 1.5 --presence-penalty -1 --frequency-penalty 2 "
        "--logit-bias 7=-2.5 --logit-bias 8=1 --logprobs --top-logprobs 4 --ignore-eos --json "
        "--salt s --no-cache --request-id r --priority -3 --model bytes"
    )
    assert run_client(server, "generate", "hello", *argv) == 0
    request, sampling = server.request, server.request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.5, 0.25, 3)
    assert (sampling.min_p, sampling.seed, sampling.stop_token_ids) == (0.125, 9, {1, 2})
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (
        1.5,
        -1,
        2,
    )
    assert (sampling.logit_bias, sampling.logprobs, sampling.top_logprobs) == ({7: -2.5, 8: 1.0}, True, 4)
    assert sampling.ignore_eos
    assert (request.cache_salt, request.no_cache, request.request_id, request.priority) == (
        "s",
        True,
        "r",
        -3,
    )


def test_stop_strings_and_several_sequences(server: Server, capsys: Capture) -> None:
    assert run_client(server, "generate", "one two", "--stop", " ", "--n", "2") == 0
    out, err = capsys.readouterr()
    assert out == "--- 0 ---\none\n--- 1 ---\none\n"
    assert "completion 8 tokens (stop)" in err


def test_chat_takes_one_turn_from_the_command_line_or_a_pipe(
    server: Server, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_client(server, "chat", "hello", "--system", "be kind") == 0
    assert capsys.readouterr().out == "<system>be kind<user>hello\n"
    feed_stdin(monkeypatch, b"piped\n")
    assert run_client(server, "chat") == 0
    assert capsys.readouterr().out == "<user>piped\n"


def test_chat_keeps_its_history_and_takes_back_a_failed_turn(
    server: Server, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(request: EngineRequest) -> list[TokenOutput]:
        if bytes(request.prompt_ids).endswith(b"bad"):
            raise OverloadedError("full", 1.0)
        reply = EngineRequest(request_id="", prompt_ids=tuple(b"ok"), sampling=request.sampling)
        return echo(reply)

    server.generator.script = script
    feed_stdin(monkeypatch, b"one\n\nbad\ntwo\n", terminal=True)
    assert run_client(server, "chat") == 0
    out, err = capsys.readouterr()
    assert out == "> ok\n> > > ok\n> \n"
    assert "error: RESOURCE_EXHAUSTED: full\n" in err
    assert bytes(server.request.prompt_ids) == b"<user>one<assistant>ok<user>two"


def test_tokenize_prints_ids_that_generate_takes(server: Server, capsys: Capture) -> None:
    assert run_client(server, "tokenize", "hi<eos>") == 0
    assert capsys.readouterr() == ("104,105,256\n", "3 tokens\n")
    assert run_client(server, "tokenize", "hi", "--json", "--model", "bytes") == 0
    assert json.loads(capsys.readouterr().out) == {"ids": [104, 105], "count": 2}


def test_health_follows_the_server_and_names_failing_tiers(capsys: Capture) -> None:
    with running() as (server, loop):
        assert run_client(server, "health") == 0
        reasons = "checksum 1, timeout 2"
        assert capsys.readouterr() == ("SERVING\n", f"l3 is not used for now: {reasons}\n")
        assert run_client(server, "health", "--json") == 0
        assert json.loads(capsys.readouterr().out) == {"status": "SERVING", "failing_tiers": {"l3": reasons}}
        server.cache.failure = ValueError("no stats")
        assert run_client(server, "health") == 0
        assert capsys.readouterr() == ("SERVING\n", "")
        asyncio.run_coroutine_threadsafe(server.server.close(), loop).result(10)
        assert run_client(server, "health", "--json") == 1
        assert json.loads(capsys.readouterr().out) == {"status": "NOT_SERVING", "failing_tiers": {}}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generate"], ["PROMPT", "--token-ids"]),
        (["generate", "x", "--token-ids", "1"], ["PROMPT", "--token-ids"]),
        (["generate", "--token-ids", "1,x"], ["--token-ids 1,x", "1,2,3"]),
        (["generate", "--token-ids", "-1"], ["--token-ids -1", "from 0"]),
        (["generate", "x", "--max-tokens", "many"], ["--max-tokens many", "integer"]),
        (["generate", "x", "--temperature", "nan"], ["--temperature nan", "finite"]),
        (["generate", "x", "--seed", str(2**64)], ["--seed", "from 0 to 18446744073709551615"]),
        (["generate", "x", "--logit-bias", "1"], ["--logit-bias 1", "TOKEN_ID=VALUE"]),
        (["generate", "x", "--logprobs"], ["--logprobs", "--json"]),
        (["generate", "x", "--address", "here"], ["--address 'here'", "HOST:PORT"]),
        (["generate", "x", "--timeout", "-1"], ["--timeout -1.0", "0 or more"]),
        (["generate", "a\udcff"], ["PROMPT", "UTF-8"]),
        (["chat", "x", "--system", "\udcff"], ["--system", "UTF-8"]),
    ],
)
def test_unusable_arguments_are_one_line_and_status_2(
    argv: list[str], words: list[str], capsys: Capture
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    for word in words:
        assert word in err


def test_stdin_that_is_not_utf8_is_refused(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    feed_stdin(monkeypatch, b"ab\xff")
    assert main(["generate", "-"]) == 2
    assert capsys.readouterr().err == "error: stdin: must be valid UTF-8, is not at byte 2\n"


def test_interactive_chat_refuses_json(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    feed_stdin(monkeypatch, b"", terminal=True)
    assert main(["chat", "--json"]) == 2
    assert "--json and --n need a MESSAGE" in capsys.readouterr().err


def test_server_errors_are_one_line_with_the_code(server: Server, capsys: Capture) -> None:
    assert run_client(server, "generate", "x", "--top-p", "7") == 1
    assert capsys.readouterr().err == (
        "error: INVALID_ARGUMENT: top_p: must be greater than 0 and at most 1, got 7\n"
    )
    assert run_client(server, "tokenize", "x", "--model", "other") == 1
    assert "error: NOT_FOUND: model: 'other'" in capsys.readouterr().err
    server.generator.hold = 1
    assert run_client(server, "generate", "xyz", "--timeout", "0.3") == 1
    assert "error: DEADLINE_EXCEEDED: " in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "x"], ["chat", "x"], ["tokenize", "x"], ["health"]])
def test_a_server_that_is_not_there_is_named_at_once(command: list[str], capsys: Capture) -> None:
    with socket.socket() as unused:  # bound and not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        started = time.monotonic()
        assert main([*command, "--address", address]) == 1
        assert time.monotonic() - started < 3
    expected = f"error: UNAVAILABLE: no server answers at {address} (Connection refused)\n"
    assert capsys.readouterr() == ("", expected)


def test_a_listener_that_never_answers_does_not_hang_the_client(capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        assert main(["generate", "x", "--address", address]) == 1
        assert time.monotonic() - started < 15
    assert f"no server answers at {address}" in capsys.readouterr().err


def test_ctrl_c_cancels_the_call_and_exits_130(server: Server) -> None:
    server.generator.hold = 1
    command = [sys.executable, "-m", "jkv.client", "generate", "xyz", "--address", server.address]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Tests that run in the background have it ignored, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            assert process.stdout is not None
            assert os.read(process.stdout.fileno(), 1) == b"x"
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
            assert process.stderr is not None
            assert process.stderr.read() == b"\n"
        finally:
            process.kill()
    deadline = time.monotonic() + 5
    while not server.generator.closed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.generator.closed


def test_a_closed_pipe_ends_the_client_quietly(server: Server) -> None:
    command = [sys.executable, "-m", "jkv.client", "generate", "x" * 900, "--address", server.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(10) == 1
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_the_speed_counts_tokens_after_the_first() -> None:
    result = Generation(ttft=1.0, seconds=3.0)
    result.choices = {0: Choice(token_ids=[1] * 5, finish_reason="stop"), 1: Choice(token_ids=[1] * 3)}
    assert result.tokens_per_second == 3.0
    single: dict[str, Any] = {"choices": {0: Choice(token_ids=[1], finish_reason="length")}}
    assert usage_line(Generation(ttft=1.0, seconds=3.0, **single)) == (
        "prompt 0 tokens (0 cached), completion 0 tokens (length), TTFT 1.000 s"
    )
