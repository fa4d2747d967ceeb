"""Where a head's keys and values lie among a pool row's lanes, and queries and outputs arranged to match.

A load of whole groups of 128 lanes is free on a TPU, any other is not. So a product takes the whole groups
that hold a head's keys, or its values, and with them lanes of neighbours: q is zero there, and what a product
gives for them is dropped. With heads of 64, keys and values share one group; with heads of 128 no lane is
wasted.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

LANES = 128


@dataclass(frozen=True, kw_only=True)
class Span:
    """Lanes `start:stop` of a pool row; the wanted ones begin at `start + offset`."""

    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The heads of one device; query heads `group * i ...` share KV head i."""

    kv_heads: int
    group: int
    head_dim: int

    @property
    def width(self) -> int:
        """Lanes of a token in the pool."""
        return 2 * self.kv_heads * self.head_dim

    def key_span(self, head: int) -> Span:
        return self._span(2 * head)

    def value_span(self, head: int) -> Span:
        return self._span(2 * head + 1)

    @property
    def key_lanes(self) -> int:
        """Of the widest span of keys."""
        return max(self.key_span(h).size for h in range(self.kv_heads))

    @property
    def value_lanes(self) -> int:
        """Of the widest span of values."""
        return max(self.value_span(h).size for h in range(self.kv_heads))

    def _span(self, part: int) -> Span:
        first = part * self.head_dim
        start = first // LANES * LANES
        stop = min(-(-(first + self.head_dim) // LANES) * LANES, self.width)
        return Span(start=start, stop=stop, offset=first - start)


def to_query_blocks(q: jax.Array, heads: Heads, queries: int) -> jax.Array:
    """`[T, heads, head_dim]` to `[blocks, kv_heads, group * queries, key_lanes]`, zero where no query is: row
    `g * queries + i` of a block is its query i of the group's head g.
    """
    tokens, kv_heads, dim = q.shape[0], heads.kv_heads, heads.head_dim
    blocks = -(-tokens // queries)
    q = jnp.pad(q, ((0, blocks * queries - tokens), (0, 0), (0, 0)))
    q = q.reshape(blocks, queries, kv_heads, heads.group, dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(blocks, kv_heads, heads.group * queries, dim)

    def widened(q: jax.Array, offset: int) -> jax.Array:
        return jnp.pad(q, [(0, 0)] * (q.ndim - 1) + [(offset, heads.key_lanes - offset - dim)])

    offsets = [heads.key_span(h).offset for h in range(kv_heads)]
    if len(set(offsets)) == 1:
        return widened(q, offsets[0])
    return jnp.stack([widened(q[:, h], offset) for h, offset in enumerate(offsets)], axis=1)


def from_query_blocks(out: jax.Array, heads: Heads, queries: int) -> jax.Array:
    """`[blocks, kv_heads, group * queries, value_lanes]` to `[blocks * queries, heads, head_dim]`."""
    blocks, kv_heads, dim = out.shape[0], heads.kv_heads, heads.head_dim
    offsets = [heads.value_span(h).offset for h in range(kv_heads)]
    if len(set(offsets)) == 1:
        out = out[..., offsets[0] : offsets[0] + dim]
    else:
        out = jnp.stack([out[:, h, :, n : n + dim] for h, n in enumerate(offsets)], axis=1)
    out = out.reshape(blocks, kv_heads, heads.group, queries, dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(blocks * queries, kv_heads * heads.group, dim)
