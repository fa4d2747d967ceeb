"""The one description of a decoder that models, loaders and caches read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, in transformers' terms.

    `kind` picks which of the scaling fields are read: linear reads `factor`; llama3 reads `factor`,
    `low_freq_factor`, `high_freq_factor` and `original_max_position`; yarn reads `factor`,
    `original_max_position`, `beta_fast`, `beta_slow`, `attention_factor`, `mscale`, `mscale_all_dim` and
    `truncate`.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in each layer: every token goes through `per_token` of `count` MLPs, weighted by a
    softmax over all of them. `normalized` weights are scaled to sum to 1.
    """

    count: int
    per_token: int
    normalized: bool


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm decoder with gated MLP and grouped-query attention: Llama, Mistral, Mixtral, Qwen2 and 3,
    Gemma 2 and 3.

    `windows[i]` is layer i's sliding window in tokens (a query sees itself and the `window - 1` before it),
    or None. Layers with a window take `local_rope` where it is given. Norms multiply by 1 + weight where
    `norm_offset`; attention's and the MLP's outputs are normed before they are added where `output_norms`;
    `scale_embeddings` is by the root of `hidden_size`; a soft cap turns a logit x into `cap * tanh(x / cap)`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the MLP, or of each expert
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    tie_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertsConfig | None = None
    activation: Activation = "silu"
    attention_scale: float | None = None  # on q . k; None is head_dim ** -0.5
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    norm_offset: bool = False
    output_norms: bool = False
    scale_embeddings: bool = False
    local_rope: RopeConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
