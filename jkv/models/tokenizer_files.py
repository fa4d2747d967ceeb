"""The tokenizer that belongs to a checkpoint, copied beside a converted one."""

from __future__ import annotations

import shutil
from pathlib import Path

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def copy_tokenizer(location: Path, directory: Path) -> None:
    """Copy the files of a directory, or write those of a `.gguf`'s tokenizer."""
    if location.suffix == ".gguf":
        from jkv.text.tokenizer import (
            Tokenizer,
            save_tokenizer,
        )  # only here: loading weights needs no tokenizer

        save_tokenizer(Tokenizer.from_gguf(location), directory)
        return
    for name in FILES:
        if (location / name).is_file():
            shutil.copyfile(location / name, directory / name)
