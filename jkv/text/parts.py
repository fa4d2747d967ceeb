"""What every loader of a tokenizer hands over, whatever its file format."""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True, kw_only=True)
class TokenizerParts:
    """A tokenizers backend (its post-processor adds the special tokens of raw prompts) and its metadata."""

    backend: tokenizers.Tokenizer
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
