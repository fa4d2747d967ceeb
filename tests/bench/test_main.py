"""The benchmarks against servers that answer over the wire."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from jkv.bench import __main__ as bench

from .running import refusal, run_json
from .servers import MAX_MODEL_LEN, PAGE_SIZE, VOCAB_SIZE, FakeModel, grpc_server, http_server

SMALL = ("--input-len", "64", "--output-len", "5", "--num-prompts", "6")


@pytest.fixture(params=["grpc", "http"])
def target(request: pytest.FixtureRequest, model: FakeModel) -> Iterator[tuple[str, ...]]:
    """The flags for each kind of server."""
    server = grpc_server if request.param == "grpc" else http_server
    with server(model) as url:
        yield ("--target", url, *(() if request.param == "grpc" else ("--vocab-size", str(VOCAB_SIZE))))


def test_serving_sends_what_was_asked_and_measures_it(
    target: tuple[str, ...], model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model.step_s = 0.01
    report = run_json(capsys, "serving", *target, *SMALL, "--slo", "ttft=5s,tbt=5s,e2e=9s")
    summary = report["results"]["summary"]
    assert (summary["requests"], summary["failed"], summary["short_outputs"]) == (6, 0, 0)
    assert (summary["input_tokens"], summary["output_tokens"], summary["cached_tokens"]) == (384, 30, 0)
    assert summary["goodput_requests_per_s"] == summary["requests_per_s"] > 0
    assert 0.01 <= summary["ttft"]["p50"] <= summary["e2e"]["p50"]
    assert summary["tpot"]["p50"] >= 0.009
    assert summary["itl"]["mean"] >= 0.009
    assert summary["prefill_tokens_per_s"] == pytest.approx(64 / summary["ttft"]["mean"])
    assert report["calibration"]["matmul_vs_reference"] == 0.5
    assert report["target"]["model"] == "fake"
    assert model.most_running == 1
    assert len(set(model.prompts)) == 6
    assert all(len(prompt) == 64 and max(prompt) < VOCAB_SIZE for prompt in model.prompts)


def test_concurrency_keeps_that_many_in_flight(
    target: tuple[str, ...], model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model.step_s = 0.01
    report = run_json(capsys, "serving", *target, *SMALL, "--concurrency", "3", "--request-rate", "inf")
    assert model.most_running == 3
    assert report["results"]["summary"]["prefill_tokens_per_s"] is None


def test_arrivals_do_not_wait_for_answers(
    target: tuple[str, ...], model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model.step_s = 0.05
    report = run_json(capsys, "serving", *target, *SMALL, "--request-rate", "100")
    assert model.most_running >= 4
    assert report["results"]["summary"]["failed"] == 0


def test_a_shared_prefix_and_warmup_show_in_the_hit_rate(
    target: tuple[str, ...], model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_json(capsys, "serving", *target, *SMALL, "--prefix-len", "48", "--warmup", "1")
    assert report["results"]["summary"]["hit_rate"] == 0.75
    assert len(model.prompts) == 7


def test_the_same_prompt_is_cached_after_the_first(
    target: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    summary = run_json(capsys, "serving", *target, *SMALL, "--same-prompt")["results"]["summary"]
    assert summary["cached_tokens"] == 5 * 63


def test_failed_requests_are_counted_and_fail_the_run(
    target: tuple[str, ...], model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model.refused_len = 64
    report = run_json(capsys, "serving", *target, *SMALL, status=1)
    summary = report["results"]["summary"]
    assert (summary["failed"], summary["requests_per_s"], summary["ttft"]) == (6, 0, None)
    assert report["errors"][0].startswith("6 of 6 requests: ")
    assert "the queue is full" in report["errors"][0]
    assert model.prompts == []


def test_a_request_past_its_timeout_has_failed(
    target: tuple[str, ...], model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model.step_s = 0.5
    report = run_json(
        capsys, "serving", *target, "--output-len", "2", "--num-prompts", "1", "--timeout", "0.1", status=1
    )
    assert report["errors"] == ["1 of 1 requests: not done within --timeout 0.1"]


def test_a_background_load_is_measured_apart(
    target: tuple[str, ...], model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model.step_s = 0.01
    results = run_json(capsys, "serving", *target, *SMALL, "--background-input-len", "300")["results"]
    assert results["summary"]["requests"] == 6
    assert results["background_requests"] >= 2
    assert results["background_prefill_tokens_per_s"] > 0
    assert {len(prompt) for prompt in model.prompts} == {64, 300}


def test_a_background_that_fails_fails_the_run(
    target: tuple[str, ...], model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model.step_s, model.refused_len = 0.01, 300
    report = run_json(capsys, "serving", *target, *SMALL, "--background-input-len", "300", status=1)
    assert report["results"]["summary"]["failed"] == 0
    assert len(report["errors"]) == 1
    assert report["errors"][0].startswith("background: ")


def test_interference_compares_a_quiet_stream_with_a_disturbed_one(
    target: tuple[str, ...], model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model.step_s = 0.01
    flags = ("--input-len", "400", "--output-len", "8", "--num-prompts", "2")
    results = run_json(capsys, "interference", *target, *flags)["results"]
    assert results["quiet_tpot"] >= 0.009
    assert results["disturbed_gaps"] >= 1
    assert results["ratio"] == pytest.approx(results["disturbed_itl"]["p99"] / results["quiet_tpot"])
    assert results["prefill_tokens_per_s"] > 0
    assert [len(prompt) for prompt in model.prompts].count(400) == 3  # one to warm up


def test_interference_reports_prompts_that_fail(
    target: tuple[str, ...], model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model.refused_len = 400
    flags = ("--input-len", "400", "--output-len", "4", "--num-prompts", "2")
    report = run_json(capsys, "interference", *target, *flags, status=1)
    assert len(report["errors"]) == 3
    assert report["results"]["ratio"] is None


def test_cached_compares_cold_and_cached_runs(
    target: tuple[str, ...], model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_json(capsys, "cached", *target, "--input-lens", "32,70", "--repeats", "2")
    short, long = report["results"]
    assert (short["input_len"], short["cached_tokens"]) == (32, 31)
    assert (long["input_len"], long["cached_tokens"]) == (70, 64)
    assert short["speedup"] == pytest.approx(short["cold_ttft"] / short["cached_ttft"])
    assert len(model.prompts) == 2 * len(set(model.prompts)) == 12


def test_cached_fails_on_a_server_that_does_not_cache(
    target: tuple[str, ...], model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model.caching = False
    report = run_json(capsys, "cached", *target, "--input-lens", "32", "--repeats", "1", status=1)
    assert len(report["errors"]) == 2


def test_cached_fails_when_the_cold_prompts_were_cached(
    target: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("cached", *target, "--input-lens", "32", "--repeats", "1")
    run_json(capsys, *flags)
    assert "give another --seed" in run_json(capsys, *flags, status=1)["errors"][0]


def test_the_table_has_the_numbers_and_the_calibration(
    target: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, flags in {"serving": SMALL, "interference": SMALL, "cached": ("--input-lens", "32")}.items():
        assert bench.main([name, *target, *flags]) in (0, 1)
        text = capsys.readouterr().out
        assert text.startswith(f"{name}: fake at ")
        assert "matmul 65 GFLOP/s (0.50 times the reference's 130), memory read 12.3 GB/s" in text
        assert "TTFT" in text or "ITL" in text


@pytest.mark.parametrize("scheme", ["grpc", "http"])
@pytest.mark.parametrize("name", ["serving", "interference", "cached"])
def test_a_dead_target_is_one_line(name: str, scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, never listening: connections are refused
        url = f"{scheme}://127.0.0.1:{held.getsockname()[1]}"
        assert refusal(capsys, name, "--target", url).startswith(f"error: --target {url}")


def test_an_http_target_needs_a_vocabulary_size(model: FakeModel, capsys: pytest.CaptureFixture[str]) -> None:
    with http_server(model) as url:
        assert "--vocab-size: needed" in refusal(capsys, "serving", "--target", url)


def test_flags_that_do_not_suit_the_target_are_refused(
    model: FakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    with grpc_server(model) as url:
        for flags, message in (
            (("serving", "--vocab-size", "501"), f"--vocab-size 501: fake has {VOCAB_SIZE} tokens"),
            (("serving", "--model", "other"), "--model other: the target serves fake"),
            (
                ("serving", "--input-len", "999", "--output-len", "2"),
                f"1001 tokens, fake holds {MAX_MODEL_LEN}",
            ),
            (("serving", "--background-input-len", "1000"), "--background-input-len 1000: "),
            (("interference", "--input-len", "1000"), "--input-len 1000: "),
            (("cached", "--input-lens", "32,8"), f"8 is less than a page of {PAGE_SIZE} tokens"),
            (("serving", "--concurrency", "2", "--request-rate", "3"), "--concurrency and --request-rate"),
            (("serving", "--request-rate", "0"), "--request-rate 0: must be greater than 0, or inf"),
            (("serving", "--slo", "tpot=1s"), "--slo tpot=1s: 'tpot=1s' is not ttft=TIME"),
        ):
            name, *rest = flags
            assert message in refusal(capsys, name, "--target", url, *rest)
    assert model.prompts == []


def test_an_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["speed"]) == 2
    assert "'speed' is not a benchmark" in capsys.readouterr().err
    assert "--target: needed" in refusal(capsys, "serving")
