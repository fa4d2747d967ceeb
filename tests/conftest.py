from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model's GGUF file, fetched into the cache on first use."""
    from jkv.models.resolve import resolve_model

    return resolve_model("smollm2-135m-instruct", progress=False).path
