"""Small GGUF files with a tokenizer and no tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from gguf import TokenType

from jkv.text.gguf_tokenizer import from_metadata
from jkv.text.tokenizer import Tokenizer

SENTENCEPIECE = Path(__file__).parents[1] / "data" / "text" / "sentencepiece_bpe.json"


def sentencepiece_golden() -> dict[str, Any]:
    """Pieces of a model trained by sentencepiece 0.2.3, with texts and the ids and decoding it gave."""
    return json.loads(SENTENCEPIECE.read_text(encoding="utf-8"))


def named(fields: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a file with these fields; see `write_gguf`."""
    return {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def build_tokenizer(fields: dict[str, Any], kind: type[Tokenizer] = Tokenizer) -> Tokenizer:
    return kind(from_metadata(named(fields), Path("model.gguf")))


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(moved)) for byte in range(256)]


def write_gguf(path: Path, fields: dict[str, Any]) -> Path:
    """Write tokenizer fields; a key without a dot is put under `tokenizer.ggml`."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in named(fields).items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_fields(**changes: Any) -> dict[str, Any]:
    """A byte-level BPE: 256 bytes, five merges, bos, eos, one user-defined and one unused token."""
    space = byte_characters()[ord(" ")]
    merges = ["i n", "a n", "t h", "th e", f"{space} th"]
    merged = [merge.replace(" ", "") for merge in merges]
    kinds = [TokenType.NORMAL] * 261 + [TokenType.CONTROL] * 2 + [TokenType.USER_DEFINED, TokenType.UNUSED]
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*byte_characters(), *merged, "<s>", "</s>", "<tool>", "[PAD0]"],
        "token_type": [int(kind) for kind in kinds],
        "merges": merges,
        "bos_token_id": 261,
        "eos_token_id": 262,
    }
    return {**fields, **changes}


def sentencepiece_fields(**changes: Any) -> dict[str, Any]:
    golden = sentencepiece_golden()
    fields = {
        "model": "llama",
        "pre": "default",
        "tokens": golden["tokens"],
        "scores": [float(score) for score in golden["scores"]],
        "token_type": golden["types"],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {**fields, **changes}
