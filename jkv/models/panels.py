"""A checkpoint's weights in panels, for CPUs' products: in the encoding that it has them in."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from jkv.kernels.cpu_product import Encoding, PanelWeight, can_encode
from jkv.models.gguf_codes import ENCODINGS
from jkv.models.gguf_source import GgufSource
from jkv.models.source import TensorSource

# Of the weights that are in panels, by the names of their tensors.
Encodings = Mapping[str, Encoding]

_STORED: dict[str, Encoding] = {
    "bfloat16": "bfloat16",
    "BF16": "bfloat16",
    **{kind.name: encoding for kind, encoding in ENCODINGS.items()},
}


def stored_encoding(source: TensorSource, name: str, inputs: int) -> Encoding:
    """That of the checkpoint, or float32 where there is none for what it has."""
    encoding = _STORED.get(source.dtype(name), "float32")
    return encoding if can_encode(inputs, encoding) else "float32"


def read_panels(source: TensorSource, name: str, encoding: Encoding) -> PanelWeight:
    """A weight of `[out, in]`, with exactly the values that `source.read` has in float32. Arrays are numpy's.

    Args:
        encoding: float32, or what `stored_encoding` says.
    """
    if encoding in ("int8", "int4"):
        assert isinstance(source, GgufSource)
        return PanelWeight.pack(source.read_codes(name), encoding)
    dtype = np.float32 if encoding == "float32" else ml_dtypes.bfloat16
    values = np.ascontiguousarray(source.read(name), dtype=dtype)
    return PanelWeight.pack(values.view(np.uint32), encoding)
