from __future__ import annotations

import pytest

from jkv import flags
from jkv.errors import ConfigError
from jkv.plan.__main__ import main
from jkv.plan.options import PlanOptions


def parse(*argv: str) -> PlanOptions:
    return flags.parse(PlanOptions, argv, prog="plan", description="")


def test_a_plan_has_the_flags_of_the_server_that_it_is_for() -> None:
    serve = parse("--max-num-seqs", "4", "--max-batched-tokens", "32", "--kv-dtype", "int8", "--ep").serve(2)
    assert (serve.tp, serve.max_num_seqs, serve.max_batched_tokens, serve.kv_dtype) == (2, 4, 32, "int8")
    assert serve.ep


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--target", "tpu-v1:1x1"), r"^--target tpu-v1:1x1: must be one of .*tpu-v6e:2x2"),
        (("--page-size", "48"), "^--page-size 48: must be a power of two"),
        (("--tp", "0"), "^--tp 0: must be 1 or more"),
        (("--kv-dtype", "fp8"), "^--kv-dtype fp8: must be one of"),
    ],
)
def test_what_a_server_would_refuse_is_refused(argv: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse(*argv)


def test_unusable_flags_end_it_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tp", "0"]) == 2
    assert capsys.readouterr().err == "error: --tp 0: must be 1 or more\n"
