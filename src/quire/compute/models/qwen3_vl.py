"""Qwen3-VL: the text model of Qwen3 with full attention, next to an encoder of images.

As in Qwen2-VL, positions have three parts, for which pairs take turns. The outputs of the first layers get rows of
their own from an image. The encoder is in vision/qwen3_vl.py.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import MAX_LAYERS, llama_like, rotary_layers, with_head_norms
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.multimodal import below, text_config, with_axes, with_other_tensors

DEFAULTS: Final = MappingProxyType({"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500_000.0})
DEEP: Final = "deepstack_visual_indexes"
USUAL_DEEP: Final = [8, 16, 24]
TEXT: Final = "model.language_model."
IMAGES: Final = ("model.visual.",)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of the text model; refuses settings that quire does not interpret."""
    text = text_config(config).over(DEFAULTS)
    text.refuse("use_sliding_window")
    spec = with_head_norms(llama_like(text, max_length, rotary_layers(text, max_length)))
    return with_other_tensors(with_images(config, text, spec), below(TEXT), IMAGES)


def with_images(config: ConfigFile, text: ConfigFile, spec: DecoderSpec) -> DecoderSpec:
    """Return the spec of a text model that reads images: with axes, and with rows for its first layers."""
    return replace(with_axes(text, spec, in_turns=True), deep_rows=len(deep_layers(config.section("vision_config"))))


def deep_layers(vision: ConfigFile) -> tuple[int, ...]:
    """Return the layers of the encoder whose states become rows for the first layers of the text model."""
    layers = vision.over({DEEP: USUAL_DEEP}).fields[DEEP]
    is_list = isinstance(layers, list) and all(type(layer) is int and 0 <= layer < MAX_LAYERS for layer in layers)
    if not isinstance(layers, list) or not is_list or layers != sorted(set(layers)):
        raise vision.error(DEEP, f"a list of layers in ascending order, below {MAX_LAYERS}")
    return tuple(layers)
