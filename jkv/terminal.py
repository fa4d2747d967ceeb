"""What command-line programs share about the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def forget_stdout() -> None:
    """After a BrokenPipeError: the reader of stdout has gone, and Python would complain again when it flushes
    at exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines: the first column to the left, the others to the right, as wide as their widest cells."""
    columns = max((len(row) for row in rows), default=0)
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(columns)]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    ]
