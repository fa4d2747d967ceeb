"""A tokenizer from a GGUF file's metadata (keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from gguf import TokenType
from tokenizers.processors import TemplateProcessing

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.models.gguf_file import read_gguf
from jkv.text import byte_level_bpe, sentencepiece_bpe
from jkv.text.gguf_vocabulary import GgufVocabulary
from jkv.text.parts import TokenizerParts

_KEY = "tokenizer.ggml."


def read_gguf_tokenizer(path: Path) -> TokenizerParts:
    """Read the header of a GGUF file; see `from_metadata`."""
    return from_metadata(read_gguf(path).metadata, path)


def from_metadata(metadata: Mapping[str, Any], path: Path) -> TokenizerParts:
    """Build the tokenizer that the metadata of the GGUF at `path` describes.

    Raises:
        UnsupportedModelError: a tokenizer model or pre-tokenizer that jkv does not implement, named.
        ConfigError: a key that is missing, of another type, or does not fit the vocabulary.
    """
    vocabulary = GgufVocabulary(metadata, path)
    model = vocabulary.field("model", str)
    if model == "gpt2":
        backend, add_bos = byte_level_bpe.build(vocabulary)
    elif model == "llama":
        backend, add_bos = sentencepiece_bpe.build(vocabulary)
    else:
        raise UnsupportedModelError(
            f"{path}: {_KEY}model {model!r} is not supported: jkv reads gpt2 (byte-level BPE) and llama "
            "(SentencePiece BPE)"
        )
    _add_tokens(backend, vocabulary)
    bos, eos = vocabulary.token_at("bos_token_id"), vocabulary.token_at("eos_token_id")
    before = _wanted(vocabulary, "bos", bos, default=add_bos)
    after = _wanted(vocabulary, "eos", eos, default=False)
    _add_ends(backend, vocabulary, bos=before, eos=after)
    return TokenizerParts(
        backend=backend, bos_token=bos, eos_token=eos, chat_template=vocabulary.chat_template()
    )


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Make control and user-defined tokens whole, wherever they stand in a text."""
    for kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
        special = kind is TokenType.CONTROL
        backend.add_tokens(
            [
                tokenizers.AddedToken(token, normalized=False, special=special)
                for token in vocabulary.of_type(kind)
            ]
        )


def _wanted(vocabulary: GgufVocabulary, end: str, token: str | None, *, default: bool) -> str | None:
    """The token, if the metadata wants it around raw prompts."""
    if not vocabulary.field(f"add_{end}_token", bool, default):
        return None
    if token is None:
        raise ConfigError(f"{vocabulary.path}: {_KEY}add_{end}_token true needs {_KEY}{end}_token_id")
    return token


def _add_ends(
    backend: tokenizers.Tokenizer, vocabulary: GgufVocabulary, *, bos: str | None, eos: str | None
) -> None:
    """Put bos before and eos after every raw prompt, where given."""
    ends = [token for token in (bos, eos) if token is not None]
    if not ends:
        return
    backend.post_processor = TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(token, vocabulary.ids[token]) for token in ends],
    )
