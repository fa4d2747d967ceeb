"""multiturn, tiers and trace: against servers that answer over the wire, and files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from jkv.bench import __main__ as bench
from jkv.bench import engine_process

from .running import refusal, run_json
from .servers import MAX_MODEL_LEN, PAGE_BYTES, PAGE_SIZE, PAGES_CAPACITY, FakeModel, grpc_server, http_server
from .traces import make_trace


@pytest.fixture
def url(model: FakeModel) -> Iterator[str]:
    with grpc_server(model) as url:
        yield url


ROUNDS = (
    "--rounds",
    "3",
    "--first-len",
    "70",
    "--shared-len",
    "32",
    "--turn-len",
    "20",
    "--output-len",
    "10",
)


def test_conversations_hit_what_an_infinite_cache_would(
    url: str, model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run_json(capsys, "multiturn", "--target", url, "--clients", "4", *ROUNDS)["results"]
    assert [len(prompt) for prompt in model.prompts] == [70] * 4 + [100] * 4 + [130] * 4
    first, second, third = results["rounds"]
    assert first["hit_tokens"] == first["ideal_tokens"] == 3 * 32  # what they share
    assert second["hit_tokens"] == second["ideal_tokens"] == 4 * 64
    assert third["hit_tokens"] == third["ideal_tokens"] == 4 * 96
    total = results["total"]
    assert total["of_ideal"] == 1
    assert total["hit_tokens_by_tier"] == {"l1": total["hit_tokens"], "l2": 0, "l3": 0, "peer": 0}
    assert results["working_set_pages"] == len(model.tiers["l1"])
    assert results["working_set_of_l1_l2"] == results["working_set_pages"] / (2 * PAGES_CAPACITY)


def test_a_server_that_keeps_nothing_shows(
    url: str, model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model.caching = False
    total = run_json(capsys, "multiturn", "--target", url, *ROUNDS, "--concurrency", "3")["results"]["total"]
    assert (total["requests"], total["hit_tokens"], total["of_ideal"]) == (24, 0, 0)
    assert total["ideal_tokens"] > 0
    assert model.most_running == 3


def test_a_working_set_is_met(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    results = run_json(capsys, "multiturn", "--target", url, "--working-set", "2", *ROUNDS)["results"]
    assert results["working_set_of_l1_l2"] == pytest.approx(2, rel=0.1)


def test_conversations_of_a_file_run_through_the_chat_template(
    url: str, model: FakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.may_end = True
    path = tmp_path / "questions.jsonl"
    questions = [["Write a poem about the sea.", "Again."], ["What is the tallest mountain on Earth?"]]
    path.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in questions))
    flags = ("--conversations", str(path), "--output-len", "30")
    results = run_json(capsys, "multiturn", "--target", url, *flags)["results"]
    assert [each["requests"] for each in results["rounds"]] == [2, 1]
    assert results["rounds"][1]["hit_tokens"] == results["rounds"][1]["ideal_tokens"] == 3 * PAGE_SIZE
    assert model.prompts[2] == tuple(b"u" + questions[0][0].encode() + b"a" + b"\x07" * 30 + b"uAgain.a")


def test_failed_turns_fail_the_run(url: str, model: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    model.refused_len = 100
    report = run_json(capsys, "multiturn", "--target", url, "--clients", "2", *ROUNDS, status=1)
    assert len(report["errors"]) == 4
    assert report["results"]["rounds"][0]["requests"] == 2


def test_multiturn_refuses_what_cannot_be_measured(
    url: str, model: FakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"turns": ["Hi."]}\n')
    for flags, message in (
        (("--rounds", "99"), f"fake holds {MAX_MODEL_LEN}"),
        (("--shared-len", "512"), "--prefix-len 512"),
        (("--clients", "2", "--conversations", str(path)), "--clients 2: "),
        (("--working-set", "2", "--conversations", str(path)), "--working-set: "),
        (("--working-set", "2", "--clients", "2"), "--clients and --working-set"),
    ):
        assert message in refusal(capsys, "multiturn", "--target", url, *flags)
    with http_server(model) as other:
        message = refusal(capsys, "multiturn", "--target", other, "--vocab-size", "500")
        assert message.startswith("error: --target: needs jkv's gRPC API")
    assert model.prompts == []


def test_loads_disturb_a_stream(url: str, model: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    model.step_s = 0.01
    flags = ("--input-len", "400", "--output-len", "8", "--num-prompts", "2", "--cached-in", "l3")
    results = run_json(capsys, "interference", "--target", url, *flags)["results"]
    assert results["disturbed_gaps"] >= 1
    longs = [prompt for prompt in model.prompts if len(prompt) == 400]
    assert len(longs) == 5  # one to warm up, two to fill the cache, the same two again
    assert longs[1:3] == longs[3:]


def test_loads_from_elsewhere_are_an_error(
    url: str, model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model.flushes, model.step_s = False, 0.01
    flags = ("--input-len", "400", "--output-len", "8", "--num-prompts", "1", "--cached-in", "l2")
    report = run_json(capsys, "interference", "--target", url, *flags, status=1)
    assert "not from l2" in report["errors"][0]


def test_each_tier_is_measured_alone(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ("--input-lens", "64,100", "--repeats", "2", "--directory", str(tmp_path))
    results = run_json(capsys, "tiers", "--target", url, *flags)["results"]
    assert [each["input_len"] for each in results["lengths"]] == [64, 100]
    assert all(list(each["ttft"]) == ["cold", "l1", "l2", "l3"] for each in results["lengths"])
    speeds = results["speeds"]
    assert (speeds["pages"], speeds["page_bytes"]) == (6, PAGE_BYTES)
    assert speeds["l2_load"] == 5e9
    assert min(speeds["l3_read"], speeds["l3_write"], *speeds["machine"].values()) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_run_from_another_tier_is_an_error(
    url: str, model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model.flushes = False
    report = run_json(capsys, "tiers", "--target", url, "--input-lens", "64", "--repeats", "1", status=1)
    assert "64 tokens, l2: served {'l1': 63}, not 63 from l2" in report["errors"]
    assert list(report["results"]["lengths"][0]["ttft"]) == ["cold", "l1"]
    assert report["results"]["speeds"] is None


SERVER = """\
    #!{python}
    import signal, sys
    import grpc
    from jkv.api import jkv_pb2, jkv_pb2_grpc
    if "--fail" in sys.argv:
        sys.exit("no such model")
    with grpc.insecure_channel("{address}") as channel:
        jkv_pb2_grpc.CacheStub(channel).Flush(jkv_pb2.FlushRequest(tiers=["l1", "l2"]))
    print("listening on {address}, loading fake", flush=True)
    print("ready: fake on {address}", flush=True)
    signal.sigwait({{signal.SIGTERM}})
    """


@pytest.fixture
def _own_server(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for `python -m jkv.serve`: as it starts, L1 and L2 of the model are empty."""
    script = tmp_path / "python"
    script.write_text(dedent(SERVER.format(python=sys.executable, address=url.removeprefix("grpc://"))))
    script.chmod(0o755)
    monkeypatch.setattr(engine_process.sys, "executable", str(script))


@pytest.mark.usefixtures("_own_server")
def test_a_server_of_its_own_is_restarted(capsys: pytest.CaptureFixture[str]) -> None:
    results = run_json(capsys, "tiers", "--input-lens", "64", "--repeats", "1")["results"]
    assert list(results["lengths"][0]["ttft"]) == ["cold", "l1", "l2", "l3", "restart"]


@pytest.mark.usefixtures("_own_server")
def test_a_server_that_does_not_start_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "tiers", "--serve-flags=--fail")
    assert message == "error: the server ended with status 1:\nno such model\n"


def test_tiers_refuses_what_cannot_be_measured(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        (("--target", url, "--input-lens", "8"), f"8 is less than a page of {PAGE_SIZE} tokens"),
        (("--target", url, "--serve-flags=--l3-sync"), "--target and --serve-flags"),
        (("--directory", "/nowhere"), "--directory /nowhere: is not a directory"),
        (("--input-lens", "x"), "--input-lens x: "),
    ):
        assert message in refusal(capsys, "tiers", *flags)


def test_a_trace_is_replayed_at_each_capacity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_trace(tmp_path / "trace.jsonl", requests=120)
    report = run_json(capsys, "trace", "--file", str(path), "--capacities", "10,60,inf")
    small, middle, infinite = report["results"]["capacities"]
    assert (small["capacity"], middle["capacity"], infinite["capacity"]) == (10, 60, None)
    assert small["by_tier"]["l1"] is None  # the longest prompt does not fit
    ideal = report["results"]["ideal"]
    for tier in ("l1", "l2", "l3"):
        assert 0.97 * ideal < infinite["by_tier"][tier] <= ideal
        assert middle["plain_lru"] <= middle["by_tier"][tier] < infinite["by_tier"][tier]
    assert report["target"] is None
    assert 0 < report["results"]["cpu_microseconds_per_block"] < 5000


def test_the_tables_have_the_numbers(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_trace(tmp_path / "trace.jsonl", requests=20)
    for name, flags, column in (
        ("multiturn", ("--target", url, *ROUNDS), "of ideal"),
        ("tiers", ("--target", url, "--input-lens", "64", "--repeats", "1"), "TTFT, ms"),
        ("trace", ("--file", str(path)), "plain LRU"),
    ):
        assert bench.main([name, *flags]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"{name}: ")
        assert column in text
        assert ("memory read 12.3 GB/s" in text) == (name != "trace")


@pytest.mark.parametrize("capacities", ["", "0", "5,", "many", "-3"])
def test_capacities_are_refused_by_name(capacities: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("trace", "--file", "x", f"--capacities={capacities}")
    assert f"--capacities {capacities}: " in refusal(capsys, *flags)


def test_trace_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--file: needed" in refusal(capsys, "trace")
