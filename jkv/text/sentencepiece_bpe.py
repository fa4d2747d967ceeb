"""SentencePiece BPE from pieces and scores, as a tokenizers BPE with the merges that the scores imply."""

from __future__ import annotations

import tokenizers
from gguf import TokenType
from tokenizers import decoders, models, normalizers

from jkv.errors import UnsupportedModelError
from jkv.text.gguf_vocabulary import GgufVocabulary

_SPACE = "▁"


def build(vocabulary: GgufVocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """The backend, without added tokens, and whether a raw prompt starts with bos by default (it does).

    As in llama.cpp, the text and every part of it after a special token get a space in front.

    Raises:
        UnsupportedModelError: no byte pieces, tied scores, or a normalization that jkv does not implement.
        ConfigError: a field that is missing or of another type.
    """
    _check_plain(vocabulary)
    byte_pieces = [vocabulary.ids.get(f"<0x{byte:02X}>") for byte in range(256)]
    if any(i is None or vocabulary.types[i] != TokenType.BYTE for i in byte_pieces):
        raise UnsupportedModelError(
            f"{vocabulary.path}: the llama tokenizer lacks some of the byte pieces <0x00> to <0xFF>"
        )
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary.ids, merges=_merges(vocabulary), fuse_unk=True, byte_fallback=True)
    )
    prefix = vocabulary.field("add_space_prefix", bool, True)
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(_SPACE)] if prefix else []), normalizers.Replace(" ", _SPACE)]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return backend, True


def _check_plain(vocabulary: GgufVocabulary) -> None:
    if vocabulary.field("remove_extra_whitespaces", bool, False):
        raise UnsupportedModelError(
            f"{vocabulary.path}: tokenizer.ggml.remove_extra_whitespaces true is not supported"
        )
    if vocabulary.has("precompiled_charsmap"):
        raise UnsupportedModelError(
            f"{vocabulary.path}: tokenizer.ggml.precompiled_charsmap is not supported"
        )


def _merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Every split of every piece into two pieces, best score first.

    SentencePiece joins the neighbours whose joint piece scores best, the leftmost of equals; BPE joins by
    the pair's rank. The two agree when no two pieces of several characters share a score.
    """
    scores = vocabulary.array("scores", float, len(vocabulary.tokens))
    pieces = {
        token: score
        for token, score, kind in zip(vocabulary.tokens, scores, vocabulary.types, strict=True)
        if kind == TokenType.NORMAL
    }
    joined = sorted((piece for piece in pieces if len(piece) > 1), key=lambda piece: -pieces[piece])
    if len({pieces[piece] for piece in joined}) != len(joined):
        raise UnsupportedModelError(f"{vocabulary.path}: tokenizer.ggml.scores has ties between its pieces")
    return [
        (piece[:cut], piece[cut:])
        for piece in joined
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
