from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.text import byte_level_bpe
from jkv.text.gguf_vocabulary import GgufVocabulary
from jkv.text.tokenizer import Tokenizer
from tests.text.gguf_files import (
    build_tokenizer,
    byte_level_fields,
    named,
    sentencepiece_fields,
    sentencepiece_golden,
    write_gguf,
)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """The text of each token."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids]


def splits(pre: str, text: str) -> list[str]:
    """How a pre-tokenizer splits text before merging."""
    vocabulary = GgufVocabulary(named(byte_level_fields(pre=pre)), Path("model.gguf"))
    backend, _ = byte_level_bpe.build(vocabulary)
    assert backend.pre_tokenizer is not None
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


def test_a_file_gives_what_its_fields_say(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", byte_level_fields(**{"tokenizer.chat_template": "{{ messages }}"}))
    tokenizer = Tokenizer.load(path)
    assert tokenizer.chat_template == "{{ messages }}"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (261, 262)
    assert pieces(tokenizer, "then the bin") == ["the", "n", " ", "the", " ", "b", "in"]


def test_loading_smollm2_is_fast(smollm2_gguf: Path) -> None:
    started = time.process_time()
    Tokenizer.from_gguf(smollm2_gguf)
    assert time.process_time() - started < 2  # 0.3 s; gguf's own reader takes 2 s for the header alone


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "I'm 2024  it's\n", ["I", "'m", " 2024", " ", " it", "'s", "\n"]),
        ("smollm", "x\n\n  0.5", ["x", "\n\n ", " 0", ".", "5"]),
        ("llama-bpe", "I'M 2024\n\n ok", ["I", "'M", " ", "202", "4", "\n\n", " ok"]),
        ("llama-bpe", "f(x):\n  y", ["f", "(x", "):\n", " ", " y"]),
        ("qwen2", "I'M 2024\n\n ok", ["I", "'M", " ", "2", "0", "2", "4", "\n\n", " ok"]),
        ("tekken", "camelCase 42//\n", ["camel", "Case", " ", "4", "2", "//\n"]),
    ],
)
def test_pre_tokenizers_split_as_published(pre: str, text: str, expected: list[str]) -> None:
    assert splits(pre, text) == expected


def test_qwen2_composes_characters() -> None:
    tokenizer = build_tokenizer(byte_level_fields(pre="qwen2"))
    ids = tokenizer.encode("e\u0301", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "\u00e9"


def test_whole_words_need_no_merges() -> None:
    """Llama 3 takes a word that is a token as it is, even where no merge leads to it."""
    fields = byte_level_fields(
        pre="llama-bpe", tokens=["nice" if t == "the" else t for t in byte_level_fields()["tokens"]]
    )
    fields["merges"] = [merge for merge in fields["merges"] if merge != "th e"]
    assert pieces(build_tokenizer(fields), "nice") == ["nice"]
    assert pieces(build_tokenizer({**fields, "pre": "gpt-2"}), "nice") == ["n", "i", "c", "e"]


def test_control_user_defined_and_unused_tokens() -> None:
    tokenizer = build_tokenizer(byte_level_fields())
    ids = tokenizer.encode("<s>in<tool>[PAD0]", add_special_tokens=False)
    assert ids[:3] == [261, 256, 263]
    assert 264 not in ids
    assert tokenizer.special_ids == {261, 262}
    assert tokenizer.decode(ids, skip_special_tokens=True) == "in<tool>[PAD0]"
    assert tokenizer.decode([264], skip_special_tokens=False) == ""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [256]),
        ({"add_bos_token": True}, [261, 256]),
        ({"add_eos_token": True}, [256, 262]),
        ({"add_bos_token": True, "add_eos_token": True}, [261, 256, 262]),
        ({"pre": "llama-bpe"}, [261, 256]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [256]),
    ],
)
def test_bos_and_eos_around_raw_prompts(changes: dict[str, Any], expected: list[int]) -> None:
    tokenizer = build_tokenizer(byte_level_fields(**changes))
    assert tokenizer.encode("in", add_special_tokens=True) == expected
    assert tokenizer.encode("in", add_special_tokens=False) == [256]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model 'bert'"),
        ({"pre": "falcon"}, "tokenizer.ggml.pre 'falcon'"),
        ({"pre": "default"}, "tokenizer.ggml.pre 'default'"),
    ],
)
def test_unknown_tokenizers_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        build_tokenizer(byte_level_fields(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": None}, "no tokenizer.ggml.pre"),
        ({"pre": 3}, "tokenizer.ggml.pre 3 must be of type str"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be an array of str"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 items"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges"),
        ({"merges": ["zz y"]}, "tokenizer.ggml.merges"),
        ({"bos_token_id": 999}, "tokenizer.ggml.bos_token_id 999"),
        ({"eos_token_id": 264}, "tokenizer.ggml.eos_token_id 264"),
        ({"bos_token_id": None, "add_bos_token": True}, "add_bos_token true needs"),
        ({"tokenizer.chat_template": 5}, "tokenizer.chat_template must be a string"),
    ],
)
def test_damaged_metadata_is_named(changes: dict[str, Any], message: str) -> None:
    fields = {key: value for key, value in byte_level_fields(**changes).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(fields)


def test_a_token_twice_is_refused() -> None:
    fields = byte_level_fields()
    fields["tokens"] = [*fields["tokens"][:-3], "<s>", *fields["tokens"][-2:]]
    with pytest.raises(ConfigError, match="same token twice"):
        build_tokenizer(fields)


def test_a_vocabulary_without_plain_text_is_refused() -> None:
    tokens = ["[no a]" if token == "a" else token for token in byte_level_fields()["tokens"]]
    with pytest.raises(UnsupportedModelError, match="no token for the text 'a'"):
        build_tokenizer(byte_level_fields(tokens=tokens, merges=["i n"]))


GOLDEN = sentencepiece_golden()


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=range(len(GOLDEN["cases"])))
def test_sentencepiece_bpe_equals_sentencepiece(case: dict[str, Any]) -> None:
    tokenizer = build_tokenizer(sentencepiece_fields())
    assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
    assert tokenizer.decode(case["ids"], skip_special_tokens=True) == case["decoded"]


SENTENCEPIECE = build_tokenizer(sentencepiece_fields())


def reference_merge(symbols: list[str], scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule, as plainly as it can be put: join the best-scored pair, leftmost of equals."""
    while True:
        pairs = [(scores.get(a + b), -i) for i, (a, b) in enumerate(itertools.pairwise(symbols))]
        known = [(score, at) for score, at in pairs if score is not None]
        if not known:
            return symbols
        at = -max(known)[1]
        symbols = [*symbols[:at], symbols[at] + symbols[at + 1], *symbols[at + 2 :]]


@given(st.text(alphabet="aehinorst bcé你", max_size=40))
def test_sentencepiece_bpe_joins_by_score(text: str) -> None:
    kinds = zip(GOLDEN["tokens"], GOLDEN["scores"], GOLDEN["types"], strict=True)
    scores = {token: score for token, score, kind in kinds if kind == TokenType.NORMAL}
    ids = {token: i for i, token in enumerate(GOLDEN["tokens"])}
    expected = []
    for symbol in reference_merge(list("▁" + text.replace(" ", "▁")) if text else [], scores):
        in_bytes = [f"<0x{byte:02X}>" for byte in symbol.encode()]
        expected += [ids[symbol]] if symbol in scores else [ids[name] for name in in_bytes]
    assert SENTENCEPIECE.encode(text, add_special_tokens=False) == expected


def test_sentencepiece_bos_default_and_prefix() -> None:
    assert SENTENCEPIECE.encode("a", add_special_tokens=True)[0] == 1
    plain = build_tokenizer(sentencepiece_fields(add_bos_token=False, add_space_prefix=False))
    ids = plain.encode("the a", add_special_tokens=True)
    assert [GOLDEN["tokens"][i] for i in ids] == ["t", "he", "▁a"]
    assert plain.decode(ids, skip_special_tokens=True) == "the a"


def test_sentencepiece_text_after_a_special_token_gets_a_space() -> None:
    ids = SENTENCEPIECE.encode("a<|end|>a", add_special_tokens=False)
    assert [GOLDEN["tokens"][i] for i in ids] == ["▁a", "<|end|>", "▁a"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [0.0] * len(GOLDEN["tokens"])}, "scores has ties"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"precompiled_charsmap": [1]}, "precompiled_charsmap"),
        ({"token_type": [1] * len(GOLDEN["tokens"])}, "byte pieces"),
    ],
)
def test_sentencepiece_variants_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        build_tokenizer(sentencepiece_fields(**changes))
