"""Conversations whose prompts grow by each answer and each new turn."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from jkv.bench.load import Prompt, PromptShape, prompts
from jkv.errors import ConfigError


class Tokenizer(Protocol):
    """The server's own, over the wire; both raise TargetError where it refuses."""

    async def tokenize(self, messages: Sequence[tuple[str, str]]) -> Prompt:
        """The prompt that (role, content) messages make."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Their text, special tokens left out."""
        ...


class Dialogue(Protocol):
    """One conversation: take a prompt, then give its answer, and so on."""

    @property
    def ends_itself(self) -> bool:
        """Whether an answer ends at the model's end token, rather than after all tokens asked for."""
        ...

    async def prompt(self) -> Prompt | None:
        """The history with the next turn; None after the last one."""
        ...

    async def answered(self, output_ids: Sequence[int]) -> None: ...


class SyntheticDialogue:
    """Random token ids without an end; the answers are kept as they came."""

    ends_itself = False

    def __init__(self, first: Prompt, turns: Iterator[Prompt]) -> None:
        """`turns` are what the user says after each answer."""
        self._answered, self._coming = (), first
        self._turns = turns

    async def prompt(self) -> Prompt | None:
        return (*self._answered, *self._coming)

    async def answered(self, output_ids: Sequence[int]) -> None:
        self._answered = (*self._answered, *self._coming, *output_ids)
        self._coming = next(self._turns)


class ChatDialogue:
    """Turns in words under the model's chat template; answers go through text, as in a chat client."""

    ends_itself = True

    def __init__(self, turns: Sequence[str], tokenizer: Tokenizer) -> None:
        self._turns, self._tokenizer = iter(turns), tokenizer
        self._messages: list[tuple[str, str]] = []

    async def prompt(self) -> Prompt | None:
        turn = next(self._turns, None)
        if turn is None:
            return None
        self._messages.append(("user", turn))
        return await self._tokenizer.tokenize(self._messages)

    async def answered(self, output_ids: Sequence[int]) -> None:
        self._messages.append(("assistant", await self._tokenizer.detokenize(output_ids)))


def synthetic(count: int, *, first: PromptShape, turn_len: int) -> list[SyntheticDialogue]:
    """`count` dialogues that start with prompts of the shape `first` and go on with turns of `turn_len`."""
    openings = prompts(first)
    return [
        SyntheticDialogue(
            next(openings),
            prompts(
                PromptShape(
                    input_len=turn_len,
                    vocab_size=first.vocab_size,
                    seed=first.seed,
                    series=f"turns of {number}",
                )
            ),
        )
        for number in range(count)
    ]


def read_conversations(path: Path) -> list[list[str]]:
    """The users' turns of a file in MT-Bench's format: a JSON object with `turns` on each line.

    Raises:
        ConfigError: a file that cannot be read, or a line of another kind; says which and why.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--conversations {path}: {error}") from error
    conversations = []
    for number, line in enumerate(lines, 1):
        try:
            turns = json.loads(line)["turns"]
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"--conversations {path}: line {number} has no turns: {error!r}") from error
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ConfigError(f"--conversations {path}: line {number}: turns must be a list of strings")
        conversations.append(turns)
    if not conversations:
        raise ConfigError(f"--conversations {path}: has no conversations")
    return conversations
