"""What Gemma 2 and 3 have beside other models, from a GGUF's metadata.

llama.cpp derives from the architecture and the number of layers what the keys leave open, as its loaders
`gemma2` and `gemma3` do (https://github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from dataclasses import replace

from jkv.models.config import ModelConfig, RopeConfig
from jkv.models.gguf_keys import Keys

# The 27B models: their attention is scaled by hidden_size / heads, and that of all others by head_dim.
_OF_27B = {"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62}


def gemma_config(config: ModelConfig, keys: Keys) -> ModelConfig:
    """`config` with Gemma's norms, scales, soft caps, windows and, for Gemma 3, the rope of its windows.

    Raises:
        ConfigError: a key that is missing or out of range.
    """
    gemma3 = config.architecture == "Gemma3ForCausalLM"
    large = config.num_layers == _OF_27B[config.architecture]
    scaled_by = config.hidden_size // config.num_heads if large else config.head_dim
    if gemma3:
        keys.number("rope.freq_base")  # llama.cpp's default is not Gemma 3's: it must be there
    window = keys.count("attention.sliding_window", None if gemma3 else 4096)
    every = keys.count("attention.sliding_window_pattern", 6) if gemma3 else 2
    return replace(
        config,
        windows=tuple(window if (i + 1) % every else None for i in range(config.num_layers)),
        activation="gelu_tanh",
        attention_scale=scaled_by**-0.5,
        attention_soft_cap=None if gemma3 else keys.number("attn_logit_softcapping", 50.0),
        final_soft_cap=_final_soft_cap(keys, gemma3=gemma3),
        norm_offset=True,
        output_norms=True,
        scale_embeddings=True,
        local_rope=RopeConfig(theta=keys.number("rope.freq_base_swa", 10000.0)) if gemma3 else None,
    )


def _final_soft_cap(keys: Keys, *, gemma3: bool) -> float | None:
    if gemma3 and keys.get("final_logit_softcapping") is None:
        return None
    return keys.number("final_logit_softcapping", 30.0)
