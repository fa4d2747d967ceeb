"""A program's host inputs as one int32 vector: what a call costs grows with its arguments, about 10
microseconds for a small one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def packed_size(layout: Any) -> int:
    """Length of the vector for a tree of abstract arrays, whose elements have 32 bits or are bools."""
    return sum(x.size for x in jax.tree.leaves(layout))


def views(vector: np.ndarray, layout: Any) -> Any:
    """The layout's arrays as writable views of a numpy vector; bools are int32 there."""
    parts = [cut if x.dtype == jnp.bool_ else cut.view(x.dtype) for cut, x in _cuts(vector, layout)]
    return jax.tree.unflatten(jax.tree.structure(layout), parts)


def unpack(vector: jax.Array, layout: Any) -> Any:
    """The layout's arrays, inside a program."""
    parts = [
        cut != 0 if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(cut, x.dtype)
        for cut, x in _cuts(vector, layout)
    ]
    return jax.tree.unflatten(jax.tree.structure(layout), parts)


def _cuts(vector: Any, layout: Any) -> Iterator[tuple[Any, jax.ShapeDtypeStruct]]:
    end = 0
    for x in jax.tree.leaves(layout):
        start, end = end, end + x.size
        yield vector[start:end].reshape(x.shape), x
