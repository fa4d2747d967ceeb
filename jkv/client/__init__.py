"""The command-line client: `jkv`, or `python -m jkv.client`."""

from __future__ import annotations

from jkv.client.cli import main

__all__ = ["main"]
