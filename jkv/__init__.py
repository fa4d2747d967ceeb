"""jkv: a JAX/XLA server for large language models whose KV cache has several levels."""

from __future__ import annotations

__version__ = "0.1.0"
