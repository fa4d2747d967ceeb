"""What command-line programs share about the terminal."""

from __future__ import annotations

import os
import sys


def forget_stdout() -> None:
    """After a BrokenPipeError: the reader of stdout has gone, and Python would complain again when it flushes
    at exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
