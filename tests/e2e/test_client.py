"""`python -m jkv.client` against a real server."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.e2e.server import Server, environment, run

Golden = dict[str, dict[str, Any]]
QUESTION = "What is the capital of France?"
_END_OF_FILE = "\x04"
ANSWER = "The capital of France is Paris."


def client(server: Server, command: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return run("jkv.client", command, "--address", server.address, *arguments, **options)


def test_chat_streams_the_answer_and_tells_the_usage(smollm2: Server) -> None:
    done = client(smollm2, "chat", QUESTION, "--temperature", "0")
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n")
    assert done.stderr.startswith("prompt 37 tokens (")
    assert "completion 8 tokens (stop), TTFT " in done.stderr


def test_chat_reads_a_pipe(smollm2: Server) -> None:
    done = client(smollm2, "chat", "--temperature", "0", input=f"{QUESTION}\n")
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n")


def test_chat_goes_turn_by_turn_on_a_terminal(smollm2: Server) -> None:
    ours, theirs = pty.openpty()
    shown = ""
    command = [sys.executable, "-m", "jkv.client", "chat", "--address", smollm2.address, "--temperature", "0"]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment(TERM="dumb")
    )
    try:
        for line in (f"{QUESTION}\n", "Thanks!\n", _END_OF_FILE):
            shown += _read_until(ours, "> ")
            os.write(ours, line.encode())
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
    assert process.returncode == 0
    assert f"\n{ANSWER}\n> " in shown.replace("\r", "")
    first, second = errors.decode().splitlines()
    assert first.startswith("prompt 37 tokens (")
    assert int(second.split()[1]) > 37 + 8, "the second turn holds the first one"


def _read_until(terminal: int, end: str) -> str:
    """What a terminal shows next, up to and with `end`."""
    shown = b""
    while not shown.endswith(end.encode()):
        assert select.select([terminal], [], [], 30)[0], f"{end!r} does not come: {shown!r}"
        shown += os.read(terminal, 1)
    return shown.decode()


def test_generate_prints_one_json_document(smollm2: Server, golden: Golden) -> None:
    case = golden["capital"]
    done = client(smollm2, "generate", case["rendered"], "--temperature", "0", "--json", "--logprobs")
    assert done.returncode == 0
    document = json.loads(done.stdout)
    choice = document["choices"][0]
    assert (choice["text"], choice["token_ids"]) == (case["text"], case["greedy_ids"])
    assert choice["finish_reason"] == "stop"
    assert [entry["id"] for entry in choice["logprobs"]] == case["greedy_ids"]
    assert document["usage"]["prompt_tokens"] == len(case["prompt_ids"])
    assert document["usage"]["completion_tokens"] == len(case["greedy_ids"])


def test_generate_takes_token_ids(smollm2: Server, golden: Golden) -> None:
    case = golden["capital"]
    tokens = ",".join(map(str, case["prompt_ids"]))
    done = client(smollm2, "generate", "--token-ids", tokens, "--temperature", "0")
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n")


def test_tokenize(smollm2: Server, golden: Golden) -> None:
    case = golden["raw-completion"]
    done = client(smollm2, "tokenize", "-", "--json", input=case["prompt"])
    assert done.returncode == 0
    assert json.loads(done.stdout) == {"ids": case["prompt_ids"], "count": len(case["prompt_ids"])}


@pytest.mark.parametrize(
    ("flags", "output"),
    [((), "SERVING\n"), (("--json",), '{"status": "SERVING", "failing_tiers": {}}\n')],
)
def test_health(tiny: Server, flags: tuple[str, ...], output: str) -> None:
    done = client(tiny, "health", *flags)
    assert (done.returncode, done.stdout, done.stderr) == (0, output, "")


@pytest.mark.parametrize(
    ("command", "status", "error"),
    [
        ("generate text --temperature -1", 1, "INVALID_ARGUMENT: temperature: must be at least 0"),
        ("generate text --model gpt-5", 1, "NOT_FOUND: model: 'gpt-5' is not served here"),
        ("generate text --n 3.5", 2, "--n 3.5: expected an integer"),
        ("generate", 2, "give either PROMPT"),
        ("health --address 127.0.0.1:1", 1, "no server answers at 127.0.0.1:1"),
    ],
)
def test_failures_are_one_line_and_a_status(smollm2: Server, command: str, status: int, error: str) -> None:
    done = client(smollm2, *command.split())
    assert done.returncode == status
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")
    assert error in done.stderr


def test_a_client_that_ctrl_c_interrupts_exits_with_130_and_frees_the_engine(smollm2: Server) -> None:
    arguments = ["Once", "--ignore-eos", "--max-tokens", "4000"]
    command = [sys.executable, "-m", "jkv.client", "generate", *arguments, "--address", smollm2.address]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(1), "it streams"
        before = smollm2.idle_lines()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in errors
    in_use, _, _, _ = smollm2.wait_idle(before)
    assert in_use == 0
