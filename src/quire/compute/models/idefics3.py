"""Idefics 3 and SmolVLM: the text model of Llama, next to an encoder of images.

The encoder is in vision/idefics3.py.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models import llama
from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.multimodal import below, text_config, with_other_tensors

DEFAULTS: Final = MappingProxyType({"rms_norm_eps": 1e-5})
TEXT: Final = "model.text_model."
IMAGES: Final = ("model.vision_model.", "model.connector.")


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of the text model; refuses settings that quire does not interpret."""
    text = text_config(config).over(DEFAULTS)
    text.require("model_type", "llama", None)
    return with_other_tensors(llama.decoder_spec(text, max_length), below(TEXT), IMAGES)
