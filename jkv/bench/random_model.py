"""A model with random weights, as files that an engine loads like any other."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

_SCALE = 0.02
_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama's, and how much a check asks of it: `seqs` decodes of `context` tokens, a prefill `chunk`, and
    prompts of `input_lens` in every tier.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: str
    context: int
    seqs: int
    chunk: int
    input_lens: str
    serve_flags: str

    @property
    def max_position(self) -> int:
        return 2 * max(map(int, self.input_lens.split(",")))


SHAPES = {
    # Llama 3.2 1B.
    "1b": Shape(
        hidden=2048,
        inner=8192,
        layers=16,
        heads=32,
        kv_heads=8,
        head_dim=64,
        vocab=128256,
        dtype="bfloat16",
        context=32768,
        seqs=8,
        chunk=4096,
        input_lens="2048,16384",
        serve_flags="--l2-gib 8 --l3-gib 8 --max-num-seqs 8",
    ),
    "toy": Shape(
        hidden=64,
        inner=128,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab=512,
        dtype="float32",
        context=256,
        seqs=2,
        chunk=64,
        input_lens="128",
        serve_flags="--l1-gib 32MiB --l2-gib 32MiB --l3-gib 32MiB --max-num-seqs 2 --max-batched-tokens 32 "
        "--max-mixed-tokens 16",
    ),
}


def write_random_model(directory: Path, shape: Shape) -> None:
    """Writes config.json and model.safetensors into a new directory."""
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": shape.dtype,
    }
    (directory / "config.json").write_text(json.dumps(config))
    rng, dtype = np.random.default_rng(0), _DTYPES[shape.dtype]
    save_file(
        {
            name: np.ones(size, dtype)
            if len(size) == 1
            else (rng.standard_normal(size, np.float32) * np.float32(_SCALE)).astype(dtype)
            for name, size in _tensors(shape).items()
        },
        directory / "model.safetensors",
    )


def _tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Sizes by Hugging Face's names."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = {
        "input_layernorm": (shape.hidden,),
        "self_attn.q_proj": (q, shape.hidden),
        "self_attn.k_proj": (kv, shape.hidden),
        "self_attn.v_proj": (kv, shape.hidden),
        "self_attn.o_proj": (shape.hidden, q),
        "post_attention_layernorm": (shape.hidden,),
        "mlp.gate_proj": (shape.inner, shape.hidden),
        "mlp.up_proj": (shape.inner, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.inner),
    }
    return {
        "model.embed_tokens.weight": (shape.vocab, shape.hidden),
        "model.norm.weight": (shape.hidden,),
        **{
            f"model.layers.{i}.{name}.weight": size
            for i in range(shape.layers)
            for name, size in layer.items()
        },
    }
