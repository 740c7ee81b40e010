"""LLaVA 1.5: the text model of Llama, Mistral or Qwen2, next to an encoder of images.

The encoder is in vision/llava.py.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models import llama, mistral, qwen2
from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.multimodal import text_config, with_other_tensors

TEXT: Final = "language_model."
IMAGES: Final = ("multi_modal_projector.", "vision_tower.")
MODELS: Final = MappingProxyType(
    {"llama": llama.decoder_spec, "mistral": mistral.decoder_spec, "qwen2": qwen2.decoder_spec}
)
SIZES: Final = MappingProxyType(
    {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32_000}
)
DEFAULTS: Final = MappingProxyType(
    {
        "llama": {**SIZES, "intermediate_size": 11_008, "max_position_embeddings": 2048},
        "mistral": {
            **SIZES,
            **{"intermediate_size": 14_336, "max_position_embeddings": 131_072, "num_key_value_heads": 8},
        },
        "qwen2": {},
    }
)
"""Sizes that published folders leave out."""


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of the text model; refuses settings that quire does not interpret."""
    text = text_config(config)
    text.require("model_type", *MODELS, None)
    family = str(text.fields.get("model_type") or "llama")
    spec = MODELS[family](text.over(DEFAULTS[family]), max_length)
    return with_other_tensors(spec, TEXT.__add__, IMAGES)
