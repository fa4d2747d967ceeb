"""Quantized tensors of GGUF as CPUs' products take them: code by code, so that nothing is rounded anew.
Layout of blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from jkv.kernels.cpu_product import Encoding
from jkv.models.gguf_file import GgufTensor

_HALF = 2  # bytes of a float16


def code_rows(tensor: GgufTensor) -> np.ndarray:
    """uint32 `[out, words]` of a tensor of a type in `ENCODINGS`, whose values are exactly those that it is
    dequantized to.
    """
    block, block_bytes = GGML_QUANT_SIZES[tensor.type]
    outputs, inputs = tensor.shape
    blocks = tensor.data.reshape(outputs, inputs // block, block_bytes)
    scale = _halves(blocks, 0)
    if tensor.type is GGMLQuantizationType.Q8_0:
        scales, codes = (scale,), blocks[:, :, _HALF:]
    elif tensor.type is GGMLQuantizationType.Q4_0:  # (code - 8) * scale
        scales, codes = (scale, -8 * scale), blocks[:, :, _HALF:]
    else:
        scales, codes = (scale, _halves(blocks, _HALF)), blocks[:, :, 2 * _HALF :]
    words = np.ascontiguousarray(codes).view(np.uint32)
    parts = (words, *(s.view(np.uint32) for s in scales))
    return np.concatenate(parts, axis=2).reshape(outputs, -1)


ENCODINGS: dict[GGMLQuantizationType, Encoding] = {
    GGMLQuantizationType.Q4_0: "int4",
    GGMLQuantizationType.Q4_1: "int4",
    GGMLQuantizationType.Q8_0: "int8",
}


def _halves(blocks: np.ndarray, byte: int) -> np.ndarray:
    """The float16 at that byte of each block, as float32 `[out, blocks, 1]`."""
    return np.ascontiguousarray(blocks[:, :, byte : byte + _HALF]).view(np.float16).astype(np.float32)
