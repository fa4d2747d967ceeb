"""The text model inside a Hugging Face config that has one for images beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jkv.errors import ConfigError
from jkv.models.hf_fields import Fields
from jkv.models.hf_neutral import NEUTRAL

# Architectures of which jkv runs the text model; their images it does not.
MULTIMODAL = ("Gemma3ForConditionalGeneration",)
_OF_IMAGES = (
    "vision_config",
    "mm_tokens_per_image",
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "boi_token_id",
    "eoi_token_id",
    "image_token_id",
)
# Where both objects may have the field; end tokens of both count.
_SHARED = ("eos_token_id", "bos_token_id", "tie_word_embeddings", "quantization_config")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the text model: `config` itself, or its `text_config` with what holds for both.

    Raises:
        ConfigError: there is no `text_config`, or it contradicts the outer config.
        UnsupportedModelError: an outer field that jkv does not know.
    """
    if config["architectures"][0] not in MULTIMODAL:
        return config
    outer = Fields(config, {})
    text = outer.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError(f"config field text_config={text!r}: it must be an object")
    for name in _OF_IMAGES:
        outer.get(name)
    shared = {name: value for name in _SHARED if (value := outer.get(name)) is not None}
    outer.refuse_unread(NEUTRAL)
    for name in shared.keys() & text.keys() - {"eos_token_id"}:
        if text[name] != shared[name]:
            raise ConfigError(
                f"config fields {name}={shared[name]!r} and text_config.{name}={text[name]!r} disagree"
            )
    ends = [*outer.token_ids("eos_token_id"), *Fields(text, {}, "text_config.").token_ids("eos_token_id")]
    return {**shared, **text, **({"eos_token_id": ends} if ends else {})}
