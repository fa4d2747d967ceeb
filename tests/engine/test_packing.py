from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jkv.engine.packing import packed_size, unpack, views
from jkv.engine.sampling import SampleBatch
from jkv.kernels.batch import StepBatch


def test_a_program_sees_what_was_written_into_the_views() -> None:
    layouts = (StepBatch.abstract(16, 4, 8, 4), SampleBatch.abstract(4))
    rng = np.random.default_rng(3)
    vector = np.zeros(packed_size(layouts), np.int32)
    written = views(vector, layouts)
    for x in jax.tree.leaves(written):
        x[...] = rng.standard_normal(x.shape) if x.dtype == np.float32 else rng.integers(0, 2**31, x.shape)
    flag = written[1].random
    flag[...] = True
    got = jax.jit(lambda v: unpack(v, layouts))(vector)
    for layout, x, y in zip(*map(jax.tree.leaves, (layouts, written, got)), strict=True):
        assert (y.shape, y.dtype) == (layout.shape, layout.dtype)
        np.testing.assert_array_equal(x.astype(bool) if y.dtype == jnp.bool_ else x, y)


def test_seeds_of_64_bits_keep_their_upper_halves() -> None:
    layout = SampleBatch.abstract(2)
    vector = np.zeros(packed_size(layout), np.int32)
    views(vector, layout).seeds[1] = 0xFFFFFFFF, 0x80000001
    assert unpack(jnp.asarray(vector), layout).seeds[1].tolist() == [0xFFFFFFFF, 0x80000001]
