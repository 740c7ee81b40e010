"""Qwen3-VL: the text model of Qwen3 with full attention, without images.

As in Qwen2.5-VL, the three parts of a position are equal in a text.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import PREFIX, llama_like, rotary_layers, with_head_norms
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.multimodal import text_config, with_other_tensors

DEFAULTS: Final = MappingProxyType({"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500_000.0})
TEXT: Final = "model.language_model."
IMAGES: Final = ("model.visual.",)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of the text model; refuses settings that quire does not interpret."""
    text = text_config(config).over(DEFAULTS)
    text.refuse("use_sliding_window")
    spec = with_head_norms(llama_like(text, max_length, rotary_layers(text, max_length)))
    return with_other_tensors(spec, renamed, IMAGES)


def renamed(name: str) -> str:
    """Return the name of a tensor of the text model in a file that has images too."""
    return TEXT + name.removeprefix(PREFIX) if name.startswith(PREFIX) else name
