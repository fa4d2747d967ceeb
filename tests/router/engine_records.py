"""Records of engines that differ where a test says so."""

from __future__ import annotations

import uuid
from typing import Any

from jkv.router.records import EngineRecord


def engine(name: str = "one", **changes: Any) -> EngineRecord:
    fields: dict[str, Any] = {
        "id": name,
        "address": f"{name}:50051",
        "incarnation": uuid.uuid4().hex,
        "model": "org/tiny",
        "model_root": bytes(range(16)),
        "page_size": 64,
        "kv_dtype": "float32",
        "format_version": 1,
        "tiers": ("l1", "l2"),
        "version": "0.1.0",
    }
    return EngineRecord(**(fields | changes))
