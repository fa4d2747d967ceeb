"""Pages of the KV cache in host memory, and as the bytes that other tiers keep: the same for any number of
devices that share a model.
"""

from __future__ import annotations

import jax
import numpy as np

from jkv.kernels.kv_pool import KvArrays, PoolShape

# One page of all layers, K and V; it may still be on its way there.
HostPage = KvArrays[jax.Array]


def page_ready(page: HostPage) -> bool:
    """Whether the page has arrived, so that nobody waits for it."""
    return all(x.is_ready() for x in jax.tree.leaves(page))


def page_to_bytes(page: HostPage, shape: PoolShape) -> np.ndarray:
    """A page's bytes, flat uint8, scales after values; waits until it has arrived. On one device and without
    scales a read-only view, on CPU of the page itself.
    """
    parts = [_all_heads(x, shape).reshape(-1).view(np.uint8) for x in jax.tree.leaves(page)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def page_from_bytes(data: np.ndarray, shape: PoolShape) -> KvArrays[np.ndarray]:
    """The arrays, views of `data` where their layers divide, that `page_to_bytes` made bytes of.

    Raises:
        ValueError: not the bytes of one page.
    """
    if data.nbytes != shape.page_bytes:
        raise ValueError(f"{data.nbytes} bytes are no page: one has {shape.page_bytes}")
    arrays: list[np.ndarray] = []
    leaves, tree = jax.tree.flatten(shape.abstract_page())
    start = 0
    for leaf in leaves:
        heads = (shape.kv_heads, shape.layers, *leaf.shape[2:])
        end = start + int(np.prod(heads)) * leaf.dtype.itemsize
        arrays.append(_split_layers(data[start:end].view(leaf.dtype).reshape(heads), leaf.shape, shape))
        start = end
    return jax.tree.unflatten(tree, arrays)


def _all_heads(x: jax.Array, shape: PoolShape) -> np.ndarray:
    """`[kv_heads, layers, ...]` of an array that may lie over several devices."""
    shards = sorted(x.addressable_shards, key=lambda s: s.index[0].start or 0)
    parts = [np.asarray(s.data) for s in shards]
    array = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return array.reshape(shape.kv_heads, -1, *x.shape[2:])[:, : shape.layers]


def _split_layers(heads: np.ndarray, split: tuple[int, ...], shape: PoolShape) -> np.ndarray:
    missing = split[1] * shape.copies - shape.layers
    if missing:
        heads = np.pad(heads, [(0, 0), (0, missing), *[(0, 0)] * (heads.ndim - 2)])
    return heads.reshape(split)
