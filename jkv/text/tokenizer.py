"""One tokenizer, whatever files it came from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from jkv.errors import UnsupportedModelError
from jkv.text.gguf_tokenizer import read_gguf_tokenizer
from jkv.text.hf_tokenizer import CONFIG_FILE, TOKENIZER_FILE, read_directory
from jkv.text.parts import TokenizerParts
from jkv.text.validate import check_unicode

# What decoders write for bytes that are not UTF-8, or not yet.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """Text to token ids and back. Thread-safe.

    `anchor_id` is a plain token whose text is one character: after it no token is the first of its text.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        """Wrap a backend.

        Raises:
            UnsupportedModelError: the vocabulary cannot write "a".
        """
        self._backend = parts.backend
        self.bos_token = parts.bos_token
        self.eos_token = parts.eos_token
        self.chat_template = parts.chat_template
        added = parts.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.anchor_id = self._find_anchor()
        self._inside: dict[tuple[int, bool], str] = {}

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """From a `.gguf` file, or a directory with tokenizer.json."""
        return cls.from_gguf(path) if path.suffix == ".gguf" else cls.from_directory(path)

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """From Hugging Face files; see `jkv.text.hf_tokenizer.read_directory`."""
        return cls(read_directory(path))

    @classmethod
    def from_gguf(cls, path: Path) -> Tokenizer:
        """From a GGUF's metadata; see `jkv.text.gguf_tokenizer.read_gguf_tokenizer`."""
        return cls(read_gguf_tokenizer(path))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id; ids below it may be unused."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self._backend.token_to_id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self._backend.token_to_id(self.eos_token)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids; special tokens spelled out in `text` are recognised.

        `add_special_tokens` adds what the model wants around a raw prompt (often its bos token). Pass False
        for a rendered chat: the template has written them. Releases the GIL.

        Raises:
            InvalidRequestError: `text` is not valid Unicode.
        """
        check_unicode("prompt", text)
        # The batch call, because tokenizers' encode() holds the GIL, for seconds on megabytes of text.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text; ids without a token give none, and bytes that are not UTF-8 give U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def has_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Whether `decode` looks at this id at all."""
        if skip_special_tokens and token_id in self.special_ids:
            return False
        return self._backend.id_to_token(token_id) is not None

    def text_inside(self, token_id: int, *, skip_special_tokens: bool) -> str:
        """What a token by itself adds to a text that has begun; decoded once and then looked up."""
        key = (token_id, skip_special_tokens)
        text = self._inside.get(key)
        if text is None:
            text = self.decode([self.anchor_id, token_id], skip_special_tokens=skip_special_tokens)[1:]
            self._inside[key] = text
        return text

    @cached_property
    def marks_per_character(self) -> int:
        """How many U+FFFD at the end of a decoded text one unfinished UTF-8 character can leave.

        Byte-level decoders write one for it, byte-fallback decoders one for each of its up to three bytes.
        """
        decoder = self._backend.decoder
        bytewise = decoder is not None and decoder.decode(["<0xE4>", "<0xBD>"]) == 2 * REPLACEMENT
        return 3 if bytewise else 1

    def _find_anchor(self) -> int:
        ids = self.encode("a", add_special_tokens=False)
        if not ids or self.decode(ids[-1:], skip_special_tokens=True) != "a":
            raise UnsupportedModelError("the tokenizer has no token for the text 'a'")
        return ids[-1]


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the files from which `Tokenizer.from_directory` builds the same tokenizer."""
    tokenizer._backend.save(str(directory / TOKENIZER_FILE), pretty=False)
    config = {
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "chat_template": tokenizer.chat_template,
    }
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
