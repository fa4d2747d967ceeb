"""Byte-level BPE (GPT-2's), with the text splitting that each GGUF pre-tokenizer name stands for."""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from jkv.errors import ConfigError, UnsupportedModelError
from jkv.text.gguf_vocabulary import GgufVocabulary

# The splitting expressions of the models' published tokenizer.json.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class _Style:
    """How text is split before merging.

    `pattern` None is GPT-2's own. `whole_words` takes a piece that is a token as it is, without merging.
    `add_bos` is what llama.cpp assumes where the metadata does not say.
    """

    pattern: str | None = None
    whole_words: bool = False
    add_bos: bool = False
    nfc: bool = False


_STYLES = {
    "gpt-2": _Style(),
    # As transformers 5 reads these files. The published tokenizer.json also splits single digits off first;
    # the ids differ only where two or more spaces stand before a digit.
    "smollm": _Style(),
    "llama-bpe": _Style(pattern=_LLAMA3, whole_words=True, add_bos=True),
    "qwen2": _Style(pattern=_QWEN2, nfc=True),
    "tekken": _Style(pattern=_TEKKEN, whole_words=True, add_bos=True),
}


def build(vocabulary: GgufVocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """The backend, without added tokens, and whether a raw prompt starts with bos by default.

    Raises:
        UnsupportedModelError: a pre-tokenizer that is not in the table.
        ConfigError: merges that do not fit the vocabulary.
    """
    name = vocabulary.field("pre", str)
    style = _STYLES.get(name)
    if style is None:
        raise UnsupportedModelError(
            f"{vocabulary.path}: tokenizer.ggml.pre {name!r} is not supported: "
            f"jkv knows {', '.join(_STYLES)}; serve the model from its Hugging Face files instead"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.array("merges", str)]
    try:
        model = models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=style.whole_words)  # pyright: ignore[reportArgumentType]
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"{vocabulary.path}: tokenizer.ggml.merges: {error}") from error
    backend = tokenizers.Tokenizer(model)
    if style.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(style)
    backend.decoder = decoders.ByteLevel()
    return backend, style.add_bos


def _pre_tokenizer(style: _Style) -> pre_tokenizers.PreTokenizer:
    if style.pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(style.pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
