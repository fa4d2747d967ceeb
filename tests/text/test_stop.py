from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.text.stop import StopStrings


def naive(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The whole text at once: the stop string that ends first, of those the one that starts first."""
    for end in range(1, len(text) + 1):
        if found := [len(stop) for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(found)], True
    return text, False


def could_stop_at(text: str, stops: Sequence[str]) -> int:
    """Where the longest end of `text` that begins a stop string starts."""
    return next(i for i in range(len(text) + 1) if any(stop.startswith(text[i:]) for stop in stops))


STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=6), min_size=1, max_size=4)


@given(STOPS, st.lists(st.text(alphabet="abc", max_size=5), max_size=20))
def test_equals_the_whole_text_model(stops: list[str], pieces: list[str]) -> None:
    strings = StopStrings(stops)
    sent, seen, stopped = "", "", False
    for piece in pieces:
        emit, stopped = strings.push(piece)
        sent += emit
        seen += piece
        expected, found = naive(seen, stops)
        assert stopped == found
        assert sent == (expected if found else seen[: could_stop_at(seen, stops)])
        if stopped:
            break
    sent += strings.flush()
    assert (sent, stopped) == naive(seen, stops)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["END"], "text END more", "text "),
        (["\n\n", "\nUser:"], "a\nUser: b", "a"),
        (["abcd", "bc"], "xabcd", "xa"),
        (["bc", "abc"], "xabcd", "x"),
        (["aab"], "aaab", "a"),
        (["🙂"], "hi 🙂", "hi "),
    ],
)
def test_examples(stops: list[str], text: str, expected: str) -> None:
    strings = StopStrings(stops)
    results = [strings.push(character) for character in text]
    assert "".join(emit for emit, _ in results) == expected
    assert results[-1][1]
    assert strings.push("more") == ("", True)
    assert strings.flush() == ""


def test_text_is_held_only_while_it_may_become_a_stop_string() -> None:
    strings = StopStrings(["<end>"])
    assert [strings.push(piece) for piece in ("a<", "en", "x", "<e")] == [
        ("a", False),
        ("", False),
        ("<enx", False),
        ("", False),
    ]
    assert strings.flush() == "<e"


def test_without_stop_strings_text_passes() -> None:
    strings = StopStrings([])
    assert strings.push("text") == ("text", False)
    assert strings.flush() == ""


class CountedText(str):
    """A stop string that counts how often its characters are read."""

    reads = 0

    def __getitem__(self, key: object) -> str:
        CountedText.reads += 1
        return super().__getitem__(key)  # pyright: ignore[reportArgumentType]


def test_comparisons_are_linear_however_long_the_stop_string() -> None:
    length = 2_000
    strings = StopStrings([CountedText("a" * length + "b")])
    CountedText.reads = 0
    for _ in range(5 * length):
        assert not strings.push("a")[1]
    assert CountedText.reads <= 4 * 5 * length
