from __future__ import annotations

import os
import subprocess
import sys

from jkv.terminal import aligned

_PROGRAM = """
import sys
from jkv.terminal import forget_stdout
try:
    print("x" * 100_000, flush=True)
except BrokenPipeError:
    forget_stdout()
    sys.exit(1)
"""


def test_a_reader_that_goes_away_causes_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as gone:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], stdout=gone, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert aligned([("a", "p50", "mean"), ("longer", "1.00"), ("b", "2.25", "10.00")]) == [
        "a        p50   mean",
        "longer  1.00",
        "b       2.25  10.00",
    ]
