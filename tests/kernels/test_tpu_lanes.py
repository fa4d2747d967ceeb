from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jkv.kernels.tpu_lanes import Heads, from_query_blocks, to_query_blocks

HEADS = [
    Heads(kv_heads=2, group=3, head_dim=64),
    Heads(kv_heads=4, group=1, head_dim=96),
    Heads(kv_heads=1, group=4, head_dim=128),
    Heads(kv_heads=2, group=2, head_dim=256),
    Heads(kv_heads=2, group=2, head_dim=16),
]


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_spans_are_whole_groups_of_lanes_around_a_heads_keys_and_values(heads: Heads) -> None:
    for head in range(heads.kv_heads):
        for part, span in ((0, heads.key_span(head)), (1, heads.value_span(head))):
            assert span.start % 128 == 0
            assert span.stop % 128 == 0 or span.stop == heads.width
            assert span.start + span.offset == (2 * head + part) * heads.head_dim
            assert span.offset + heads.head_dim <= span.size < span.offset + heads.head_dim + 128


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_queries_meet_their_keys_and_outputs_come_back_from_their_values(heads: Heads) -> None:
    rng = np.random.default_rng(0)
    queries, tokens = 8, 13
    q = rng.normal(size=(tokens, heads.kv_heads * heads.group, heads.head_dim)).astype(np.float32)
    token = rng.normal(size=heads.width).astype(np.float32)  # of the pool
    blocks = np.asarray(to_query_blocks(jnp.asarray(q), heads, queries))
    assert blocks.shape == (2, heads.kv_heads, heads.group * queries, heads.key_lanes)
    out = np.full((*blocks.shape[:3], heads.value_lanes), np.nan, np.float32)
    parts = token.reshape(heads.kv_heads, 2, heads.head_dim)
    for head in range(heads.kv_heads):
        keys, values = heads.key_span(head), heads.value_span(head)
        scores = blocks[:, head, :, : keys.size] @ token[keys.start : keys.stop]
        for i in range(tokens):
            for g in range(heads.group):
                want = q[i, head * heads.group + g] @ parts[head, 0]
                assert scores[i // queries, g * queries + i % queries] == pytest.approx(want, rel=1e-4)
        out[:, head, :, : values.size] = scores[..., None] * token[values.start : values.stop]
    back = np.asarray(from_query_blocks(jnp.asarray(out), heads, queries))[:tokens]
    for head in range(heads.kv_heads):
        for g in range(heads.group):
            row = q[:, head * heads.group + g]
            want = (row @ parts[head, 0])[:, None] * parts[head, 1]
            np.testing.assert_allclose(back[:, head * heads.group + g], want, rtol=1e-3, atol=1e-4)
