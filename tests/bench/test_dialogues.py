from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from jkv.bench.dialogues import ChatDialogue, read_conversations, synthetic
from jkv.bench.load import Prompt, PromptShape
from jkv.errors import ConfigError


def shape(seed: int = 0) -> PromptShape:
    return PromptShape(input_len=6, prefix_len=2, vocab_size=1000, seed=seed)


def test_a_synthetic_history_grows_by_answers_and_turns() -> None:
    async def talk() -> list[Prompt | None]:
        (dialogue,) = synthetic(1, first=shape(), turn_len=3)
        prompts = [await dialogue.prompt()]
        await dialogue.answered((7, 7))
        return [*prompts, await dialogue.prompt()]

    first, second = asyncio.run(talk())
    assert first is not None
    assert second is not None
    assert second[:8] == (*first, 7, 7)
    assert len(second) == 11


def test_dialogues_share_their_start_and_nothing_else() -> None:
    async def openings() -> list[Prompt | None]:
        return [await dialogue.prompt() for dialogue in synthetic(20, first=shape(), turn_len=3)]

    prompts = asyncio.run(openings())
    assert prompts == asyncio.run(openings())
    assert len({p[:2] for p in prompts if p}) == 1
    assert len({p[2:] for p in prompts if p}) == 20


def test_chats_go_through_the_servers_tokenizer() -> None:
    class Tokenizer:
        async def tokenize(self, messages: Sequence[tuple[str, str]]) -> Prompt:
            return tuple(ord(character) for role, content in messages for character in role[0] + content)

        async def detokenize(self, token_ids: Sequence[int]) -> str:
            return "".join(map(chr, token_ids))

    async def talk() -> list[Prompt | None]:
        dialogue = ChatDialogue(["hi", "bye"], Tokenizer())
        prompts = [await dialogue.prompt()]
        await dialogue.answered([ord("o"), ord("k")])
        return [*prompts, await dialogue.prompt(), await dialogue.prompt()]

    text = ["".join(map(chr, prompt)) if prompt else prompt for prompt in asyncio.run(talk())]
    assert text == ["uhi", "uhiaokubye", None]


def test_conversations_are_read(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}\n' * 2)
    assert read_conversations(path) == [["Write.", "Again."]] * 2


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"turn": []}', '{"turns": []}', '{"turns": "Write."}', '{"turns": [3]}']
)
def test_a_line_of_another_kind_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=r"--conversations .*: line 1"):
        read_conversations(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--conversations .*missing"):
        read_conversations(tmp_path / "missing")
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match=r"--conversations .*empty: has no conversations"):
        read_conversations(tmp_path / "empty")
