from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jkv.text.detokenize import Detokenizer
from jkv.text.tokenizer import REPLACEMENT, Tokenizer
from tests.text.gguf_files import (
    build_tokenizer,
    byte_level_fields,
    sentencepiece_fields,
    sentencepiece_golden,
)

SENTENCEPIECE = build_tokenizer(sentencepiece_fields())
BYTES = build_tokenizer(byte_level_fields())  # id i is byte i, below 256
PIECES = sentencepiece_golden()["tokens"]
SENTENCEPIECE_BYTES = {byte: PIECES.index(f"<0x{byte:02X}>") for byte in range(256)}

# Emoji with joiners, flags, CJK, combining marks, right-to-left, and U+FFFD itself.
TEXT = st.text(
    alphabet=st.one_of(
        st.sampled_from("ab  \n0é你好👩‍💻🇮🇹ö̲שلا▁\N{REPLACEMENT CHARACTER}"), st.characters(codec="utf-8")
    ),
    max_size=30,
)


def added_text(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], *, skip: bool) -> str:
    """What decoding everything at once adds to the prompt's text."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    text = tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)
    common = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
    return text[common:]


def deltas(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], *, skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.fixture(scope="module")
def smollm2_bytes(smollm2: Tokenizer) -> list[int]:
    """SmolLM2's tokens that are no whole text of their own: the hard ones."""
    return [
        i for i in range(smollm2.vocab_size) if REPLACEMENT in smollm2.decode([i], skip_special_tokens=True)
    ]


@given(data=st.data(), skip=st.booleans())
def test_any_ids_equal_decoding_all_at_once(
    smollm2: Tokenizer, smollm2_bytes: list[int], data: st.DataObject, skip: bool
) -> None:
    token = st.one_of(
        st.sampled_from(smollm2_bytes), st.integers(0, 20), st.integers(0, smollm2.vocab_size + 5)
    )
    ids = data.draw(st.lists(token, max_size=40))
    split = data.draw(st.integers(0, len(ids)))
    prompt, generated = ids[:split], ids[split:]
    expected = added_text(smollm2, prompt, generated, skip=skip)
    assert "".join(deltas(smollm2, prompt, generated, skip=skip)) == expected


@given(
    st.lists(st.sampled_from([0x41, 0x80, 0xBF, 0xC3, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF, 261]), max_size=40)
)
def test_any_bytes_at_any_split_equal_decoding_all_at_once(ids: list[int]) -> None:
    for split in range(len(ids) + 1):
        for skip in (True, False):
            expected = added_text(BYTES, ids[:split], ids[split:], skip=skip)
            assert "".join(deltas(BYTES, ids[:split], ids[split:], skip=skip)) == expected


@given(TEXT)
def test_a_text_arrives_character_by_character(text: str) -> None:
    """As bytes, one a token: at every split of prompt and output, and never a part of a character."""
    data = list(text.encode())
    for split in range(len(data) + 1):
        pieces = deltas(BYTES, data[:split], data[split:], skip=True)
        assert "".join(pieces) == added_text(BYTES, data[:split], data[split:], skip=True)
        if REPLACEMENT not in text:
            finished = len(bytes(data[:split]).decode(errors="ignore"))
            assert "".join(pieces) == text[finished:]
            assert pieces[-1] == ""


@given(TEXT, st.data())
def test_smollm2_text_round_trips_through_deltas(smollm2: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = smollm2.encode(text, add_special_tokens=False)
    split = data.draw(st.integers(0, len(ids)))
    # Not `text`: the vocabulary lacks a few bytes of rare planes.
    assert "".join(deltas(smollm2, [], ids, skip=False)) == smollm2.decode(ids, skip_special_tokens=False)
    expected = added_text(smollm2, ids[:split], ids[split:], skip=False)
    assert "".join(deltas(smollm2, ids[:split], ids[split:], skip=False)) == expected


@given(st.lists(st.integers(0, 255), max_size=60))
def test_no_more_than_one_character_is_held(ids: list[int]) -> None:
    detokenizer = Detokenizer(BYTES, [], True)
    sent = ""
    for count, token_id in enumerate(ids, start=1):
        sent += detokenizer.push(token_id)
        text = BYTES.decode(ids[:count], skip_special_tokens=True)
        assert text.startswith(sent)
        assert text[len(sent) :] in ("", REPLACEMENT)


@given(TEXT)
def test_sentencepiece_text_at_every_split_between_characters(text: str) -> None:
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False)
    whole = SENTENCEPIECE.decode(ids, skip_special_tokens=True)
    for split in range(len(ids) + 1):
        prompt, generated = ids[:split], ids[split:]
        before = SENTENCEPIECE.decode(prompt, skip_special_tokens=True)
        if not whole.startswith(before):
            continue  # inside a character
        expected = added_text(SENTENCEPIECE, prompt, generated, skip=True)
        assert "".join(deltas(SENTENCEPIECE, prompt, generated, skip=True)) == expected


def test_sentencepiece_leading_space_depends_on_the_prompt() -> None:
    ids = SENTENCEPIECE.encode("the", add_special_tokens=False)
    assert deltas(SENTENCEPIECE, [], ids, skip=True)[0] == "the"
    assert deltas(SENTENCEPIECE, [1], ids, skip=True)[0] == "the"  # bos has no text
    assert deltas(SENTENCEPIECE, [1], ids, skip=False)[0] == " the"
    assert deltas(SENTENCEPIECE, [*ids, 2, 2, 2, 2, 2], ids, skip=True)[0] == " the"


def test_sentencepiece_characters_in_bytes_are_sent_when_complete() -> None:
    run = [SENTENCEPIECE_BYTES[byte] for byte in "မြန်မာ".encode()]
    pieces = deltas(SENTENCEPIECE, SENTENCEPIECE.encode("a", add_special_tokens=False), run, skip=True)
    assert pieces == [*("" if i % 3 < 2 else "မြန်မာ"[i // 3] for i in range(len(run))), ""]


def test_sentencepiece_invalid_byte_keeps_the_characters_before_it() -> None:
    run = [SENTENCEPIECE_BYTES[byte] for byte in [*"é".encode(), 0xFF]]
    pieces = deltas(
        SENTENCEPIECE, [], [*run, *SENTENCEPIECE.encode("a", add_special_tokens=False)], skip=True
    )
    assert "".join(pieces) == "é� a"


def test_a_character_that_the_prompt_began_is_finished() -> None:
    euro = "€".encode()
    for tokenizer, ids in (
        (BYTES, [0x41, *euro]),
        (SENTENCEPIECE, [1, 3, *(SENTENCEPIECE_BYTES[byte] for byte in euro)]),
    ):
        assert "".join(deltas(tokenizer, ids[:-1], ids[-1:], skip=True)) == "€"


def test_an_unfinished_character_is_released_at_the_end() -> None:
    detokenizer = Detokenizer(BYTES, [], True)
    assert [detokenizer.push(byte) for byte in (0x41, 0xE2, 0x82)] == ["A", "", ""]
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


class Counting(Tokenizer):
    """Counts the tokens that it decodes."""

    decoded = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        (byte_level_fields(), [0x41, 0x20]),
        (byte_level_fields(), list("你".encode())),
        (byte_level_fields(), [0xFF]),
        (byte_level_fields(), [0xE2, 0x82]),
        (byte_level_fields(), list(REPLACEMENT.encode())),
        (byte_level_fields(), [261, 999]),
        (sentencepiece_fields(), [SENTENCEPIECE_BYTES[0xFF]]),
        (sentencepiece_fields(), [SENTENCEPIECE_BYTES[0xFF], *[SENTENCEPIECE_BYTES[0x41]] * 50]),
        (sentencepiece_fields(), [SENTENCEPIECE_BYTES[byte] for byte in "မ".encode()]),
        (sentencepiece_fields(), [PIECES.index("▁")]),
    ],
)
def test_decoding_work_is_linear(fields: dict[str, object], pattern: list[int]) -> None:
    count = 10_000
    tokenizer = build_tokenizer(fields, Counting)
    assert isinstance(tokenizer, Counting)
    detokenizer = Detokenizer(tokenizer, [], True)
    most = 0
    for position in range(count):
        before = tokenizer.decoded
        detokenizer.push(pattern[position % len(pattern)])
        most = max(most, tokenizer.decoded - before)
    assert most <= 100
    assert tokenizer.decoded <= 25 * count
