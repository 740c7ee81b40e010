"""Mistral Small 3.1 and 3.2, Ministral 3 and Devstral 2: the text model of Mistral or Ministral 3, with images.

Their encoder is in vision/mistral3.py.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models import ministral3, mistral
from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.multimodal import text_config, with_other_tensors

TEXT: Final = "language_model."
IMAGES: Final = ("multi_modal_projector.", "vision_tower.")
MODELS: Final = MappingProxyType({"ministral3": ministral3.decoder_spec, "mistral": mistral.decoder_spec})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of the text model; refuses settings that quire does not interpret."""
    text = text_config(config)
    text.require("model_type", *MODELS, None)
    spec = MODELS[str(text.fields.get("model_type") or "mistral")](text, max_length)
    return with_other_tensors(spec, TEXT.__add__, IMAGES)
