"""Pages of the KV cache in host memory, and as the bytes that other tiers keep."""

from __future__ import annotations

import jax
import numpy as np

from jkv.kernels.kv_pool import KvArrays, PoolShape

# One page of all layers, K and V; it may still be on its way there.
HostPage = KvArrays[jax.Array]


def page_ready(page: HostPage) -> bool:
    """Whether the page has arrived, so that nobody waits for it."""
    return all(x.is_ready() for x in jax.tree.leaves(page))


def page_to_bytes(page: HostPage) -> np.ndarray:
    """A page's bytes, flat uint8, scales after values; waits until it has arrived. Without scales a read-only
    view, on CPU of the page itself.
    """
    parts = [np.asarray(x).reshape(-1).view(np.uint8) for x in jax.tree.leaves(page)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def page_from_bytes(data: np.ndarray, shape: PoolShape) -> KvArrays[np.ndarray]:
    """The arrays, views of `data`, that `page_to_bytes` made bytes of.

    Raises:
        ValueError: not the bytes of one page.
    """
    if data.nbytes != shape.page_bytes:
        raise ValueError(f"{data.nbytes} bytes are no page: one has {shape.page_bytes}")
    arrays: list[np.ndarray] = []
    leaves, tree = jax.tree.flatten(shape.abstract_page())
    start = 0
    for leaf in leaves:
        end = start + leaf.size * leaf.dtype.itemsize
        arrays.append(data[start:end].view(leaf.dtype).reshape(leaf.shape))
        start = end
    return jax.tree.unflatten(tree, arrays)
