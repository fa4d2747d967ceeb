"""L3: immutable page objects in a TensorStore KvStore. No jax."""

from __future__ import annotations
