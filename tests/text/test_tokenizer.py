from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jkv.errors import InvalidRequestError
from jkv.text.chat import ChatTemplate, Message
from jkv.text.tokenizer import Tokenizer, save_tokenizer

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "smollm2_135m_instruct.jsonl"
CASES = [json.loads(line) for line in GOLDEN.read_text().splitlines()]


def chat_prompt(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    return template.render([Message(**message) for message in messages])


def golden_prompt(tokenizer: Tokenizer, case: dict[str, Any]) -> str:
    return chat_prompt(tokenizer, case["messages"]) if "messages" in case else case["prompt"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_prompt_ids_equal_transformers(smollm2: Tokenizer, case: dict[str, Any]) -> None:
    prompt = golden_prompt(smollm2, case)
    assert case["rendered"] in (prompt, None)  # None: too long to have been kept
    assert smollm2.encode(prompt, add_special_tokens="messages" not in case) == case["prompt_ids"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_decoding_equals_transformers(smollm2: Tokenizer, case: dict[str, Any]) -> None:
    assert smollm2.decode(case["greedy_ids"], skip_special_tokens=True) == case["text"]
    prompt = golden_prompt(smollm2, case)
    assert smollm2.decode(case["prompt_ids"], skip_special_tokens=False) == prompt


def test_smollm2_metadata(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token, smollm2.bos_token_id) == ("<|im_start|>", 1)
    assert (smollm2.eos_token, smollm2.eos_token_id) == ("<|im_end|>", 2)
    assert smollm2.special_ids == frozenset(range(17))


def test_ids_without_a_token_decode_to_nothing(smollm2: Tokenizer) -> None:
    assert smollm2.decode([17, 49152, 18], skip_special_tokens=False) == '!"'
    assert not smollm2.has_text(49152, skip_special_tokens=False)
    assert smollm2.has_text(2, skip_special_tokens=False)
    assert not smollm2.has_text(2, skip_special_tokens=True)


@pytest.mark.parametrize("text", ["\ud800", "fine until \udfff", "\U0001f600 then \ud83d"])
def test_lone_surrogates_are_refused(smollm2: Tokenizer, text: str) -> None:
    position = next(i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff")
    with pytest.raises(InvalidRequestError, match=f"character {position} is the lone surrogate") as caught:
        smollm2.encode(text, add_special_tokens=False)
    assert caught.value.field == "prompt"


def test_control_and_unassigned_characters_survive(smollm2: Tokenizer) -> None:
    text = "\0 \x7f ￾ \U0010ffff \r\n \u2028"
    assert smollm2.decode(smollm2.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_encode_releases_the_gil(smollm2: Tokenizer) -> None:
    """Another thread runs Python code while a text is encoded; with the GIL held it would not start."""
    text = "The quick brown fox. " * 20_000
    started, done = threading.Event(), threading.Event()
    progress = 0

    def count() -> None:
        nonlocal progress
        started.set()
        while not done.is_set():
            progress += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    thread.start()
    try:
        started.wait()
        sys.setswitchinterval(60)  # only a released GIL lets the other thread run
        before = progress
        smollm2.encode(text, add_special_tokens=False)
        during = progress - before
    finally:
        sys.setswitchinterval(interval)
        done.set()
        thread.join()
    assert during > 100


def test_a_saved_tokenizer_loads_as_the_same(smollm2: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(smollm2, tmp_path)
    loaded = Tokenizer.load(tmp_path)
    for case in CASES:
        prompt = golden_prompt(loaded, case)
        assert loaded.encode(prompt, add_special_tokens=True) == case["prompt_ids"]
    assert loaded.special_ids == smollm2.special_ids
    assert (loaded.bos_token_id, loaded.eos_token_id) == (1, 2)
