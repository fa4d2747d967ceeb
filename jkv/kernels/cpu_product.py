"""Products with weights in panels, by CPUs' kernel in cpu/product.cc.

A weight's values are those of float32 weights, bit for bit, but lie in the bytes that a checkpoint spends on
them: a decode on CPU takes the time of reading them. Sums are of float32 whatever the encoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

PANEL = 16
BLOCK = 32

# Of one weight: "int8" is code * scale, as in GGUF's Q8_0, "int4" code * scale + least, as in its Q4_1, with
# scales of float32 for every 32 inputs.
Encoding = Literal["float32", "bfloat16", "int8", "int4"]

_CODES = {"float32": 1, "bfloat16": 2, "int8": 4, "int4": 8}
_SCALES = {"float32": 0, "bfloat16": 0, "int8": 1, "int4": 2}


@partial(jax.tree_util.register_dataclass, data_fields=["words"], meta_fields=["outputs", "encoding"])
@dataclass(frozen=True, kw_only=True)
class PanelWeight:
    """A weight of `[outputs, inputs]` as cpu/weights.h describes it."""

    words: Any  # uint32 [panels, words of an output, 16]
    outputs: int
    encoding: Encoding

    @classmethod
    def abstract(cls, shape: tuple[int, ...], encoding: Encoding) -> PanelWeight:
        """A weight of shape `[outputs, inputs]`, with no memory."""
        outputs, inputs = shape
        panels = jax.ShapeDtypeStruct((-(-outputs // PANEL), words(inputs, encoding), PANEL), jnp.uint32)
        return cls(words=panels, outputs=outputs, encoding=encoding)

    @classmethod
    def pack(cls, rows: np.ndarray, encoding: Encoding) -> PanelWeight:
        """From uint32 `[outputs, words]` on the host: an output's codes, after each block's its scales."""
        missing = -len(rows) % PANEL
        panels = np.pad(rows, ((0, missing), (0, 0))).reshape(-1, PANEL, rows.shape[1])
        return cls(words=np.ascontiguousarray(panels.swapaxes(1, 2)), outputs=len(rows), encoding=encoding)

    def rows(self, outputs: jax.Array) -> jax.Array:
        """Those of int32 `[T]`, as float32 `[T, inputs]`."""
        return _decoded(self.words[outputs // PANEL, :, outputs % PANEL], self.encoding)


def words(inputs: int, encoding: Encoding) -> int:
    """Words of 32 bits that an output takes."""
    return inputs // _CODES[encoding] + inputs // BLOCK * _SCALES[encoding]


def can_encode(inputs: int, encoding: Encoding) -> bool:
    """Whether outputs of so many inputs fill whole words and blocks."""
    return inputs % (BLOCK if _SCALES[encoding] else _CODES[encoding]) == 0


def panel_product(x: jax.Array, weight: PanelWeight) -> jax.Array:
    """float32 `[T, inputs] -> [T, outputs]`. It reads the weight once and copies nothing. A row's bits do not
    depend on the other rows, nor on how many there are.
    """
    out = jax.ShapeDtypeStruct((x.shape[0], weight.outputs), jnp.float32)
    return jax.ffi.ffi_call("jkv_product", out)(x, weight.words)


def _decoded(rows: jax.Array, encoding: Encoding) -> jax.Array:
    """uint32 `[T, words]` to float32 `[T, inputs]`."""
    if encoding == "float32":
        return _as_float(rows)
    if encoding == "bfloat16":
        return _as_float(jnp.stack([rows << 16, rows >> 16 << 16], axis=-1)).reshape(len(rows), -1)
    in_block = BLOCK // _CODES[encoding]
    blocks = rows.reshape(len(rows), -1, in_block + _SCALES[encoding])
    codes, scales = blocks[:, :, :in_block], _as_float(blocks[:, :, in_block:])
    if encoding == "int8":
        signed = lax.bitcast_convert_type(
            codes[..., None] << (24 - 8 * jnp.arange(4, dtype=jnp.uint32)), jnp.int32
        )
        values = (signed >> 24).reshape(*codes.shape[:2], BLOCK) * scales[:, :, :1]
    else:
        shifts = 8 * jnp.arange(4, dtype=jnp.uint32) + 4 * jnp.arange(2, dtype=jnp.uint32)[:, None, None]
        unsigned = (codes[:, :, None, :, None] >> shifts) & 15
        values = unsigned.reshape(*codes.shape[:2], BLOCK) * scales[:, :, :1] + scales[:, :, 1:]
    return values.reshape(len(rows), -1)


def _as_float(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.float32)
