from __future__ import annotations

import io
import itertools
import logging

import pytest

from jkv.progress import ProgressLine

MESSAGES = ("loading 1%", "loading 50%", "loading 100%", "loaded in 2 s", "compiling 1/2", "compiling 2/2")


def test_a_terminal_gets_one_updating_line_for_each_stage() -> None:
    terminal = io.StringIO()
    progress = ProgressLine(pytest.fail, terminal)
    for message in MESSAGES:
        progress(message)
    progress.close()
    shown = [line.split("\r\x1b[K")[-1] for line in terminal.getvalue().split("\n")]
    assert shown == ["loading 100%", "loaded in 2 s", "compiling 2/2", ""]


def test_what_is_logged_meanwhile_gets_a_line_of_its_own() -> None:
    terminal = io.StringIO()
    progress = ProgressLine(pytest.fail, terminal)
    logger = logging.Logger("test")
    logger.addHandler(handler := logging.StreamHandler(terminal))
    handler.addFilter(progress.make_room)
    progress("loading 1%")
    logger.warning("careful")
    progress("loading 2%")
    progress.close()
    logger.warning("done")
    assert terminal.getvalue() == "\r\x1b[Kloading 1%\ncareful\n\r\x1b[Kloading 2%\ndone\n"


def test_a_line_is_never_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal = io.StringIO()
    ProgressLine(pytest.fail, terminal)("x" * 100)
    assert terminal.getvalue() == "\r\x1b[K" + "x" * 19


def test_a_log_gets_each_stage_at_once_and_then_now_and_then_and_the_last_word() -> None:
    logged: list[str] = []
    seconds = itertools.count()
    progress = ProgressLine(logged.append, None, every_s=5.0, clock=lambda: next(seconds))
    for message in ("loading 1%", "loading 2%", "loaded", *(f"compiling {i}" for i in range(9))):
        progress(message)
    shown = ["loading 1%", "loaded", "compiling 0", "compiling 5"]
    assert logged == shown
    progress.close()
    assert logged == [*shown, "compiling 8"]


def test_nothing_is_shown_after_the_end() -> None:
    terminal = io.StringIO()
    progress = ProgressLine(pytest.fail, terminal)
    progress("loading 1%")
    progress.close()
    before = terminal.getvalue()
    progress("loading 2%")
    progress.close()
    assert terminal.getvalue() == before
