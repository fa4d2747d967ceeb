from __future__ import annotations

from pathlib import Path

import pytest

from jkv.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_gguf)
