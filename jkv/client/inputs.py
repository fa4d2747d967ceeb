"""What a command line, a file or stdin brings as a prompt."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jkv.api import jkv_pb2 as pb
from jkv.errors import ConfigError

_READS_STDIN = ("PROMPT", "TEXT")


def text(name: str, given: str) -> str:
    """The text, or stdin's for `-` where `name` takes that; bytes that are not UTF-8 are refused."""
    if given == "-" and name in _READS_STDIN:
        return stdin()
    try:
        given.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"{name}: must be valid UTF-8") from None
    return given


def stdin() -> str:
    """All of it.

    Raises:
        ConfigError: it is not UTF-8.
    """
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin: must be valid UTF-8, is not at byte {error.start}") from None


def token_ids(given: str) -> list[int]:
    """`1,2,3` as integers.

    Raises:
        ConfigError: it is not that, or an id does not fit 32 bits.
    """
    try:
        ids = [int(part) for part in given.split(",")]
    except ValueError:
        raise ConfigError(
            f"--token-ids {given}: expected integers with commas between, as in 1,2,3"
        ) from None
    if not all(0 <= token < 2**32 for token in ids):
        raise ConfigError(f"--token-ids {given}: ids must be from 0 to {2**32 - 1}")
    return ids


def messages(path: str) -> pb.Messages:
    """A chat from a JSON file, or from stdin for `-`: a list of objects with `role` and `content`.

    Raises:
        ConfigError: the file cannot be read, or is not that.
    """
    try:
        document = json.loads(stdin() if path == "-" else Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--messages {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"--messages {path}: not valid JSON: {error}") from None
    turns = [_message(turn) for turn in document] if isinstance(document, list) else [None]
    known = [turn for turn in turns if turn is not None]
    if len(known) < len(turns):
        raise ConfigError(
            f'--messages {path}: expected a list such as [{{"role": "user", "content": "Hello"}}]'
        )
    return pb.Messages(messages=known)


def _message(turn: object) -> pb.Message | None:
    match turn:
        case {"role": str(role), "content": str(content), **rest} if not rest:
            return pb.Message(role=role, content=content)
    return None
