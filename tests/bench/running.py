"""Running a benchmark by its command line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jkv.bench import __main__ as bench


def run_json(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> dict[str, Any]:
    """Its JSON report."""
    assert bench.main([*argv, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What it says of flags that it does not take."""
    assert bench.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err
