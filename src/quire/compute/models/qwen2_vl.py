"""Qwen2-VL and Qwen2.5-VL: the text model of Qwen2, next to an encoder of images.

Positions of these models have three parts: of time, height and width. Each part turns a section of the pairs of a head.
In a text they are equal. Settings of the text model are in `text_config`, but not in the first folders. The encoders
are in vision/qwen2_vl.py and vision/qwen2_5_vl.py.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models import qwen2
from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.multimodal import text_config, with_axes, with_other_tensors
from quire.compute.models.rope import SECTIONS

DEFAULTS: Final = MappingProxyType(
    {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "max_window_layers": 80}
)
IMAGES: Final = ("visual.",)
IN_SECTIONS: Final = "mrope"
"""The type of positions with sections, which are otherwise as without a type."""


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of the text model; refuses settings that quire does not interpret."""
    text = text_config(config) if config.is_set("text_config") else config
    spec = qwen2.decoder_spec(_without_sections(text.over(DEFAULTS)), max_length)
    return with_other_tensors(with_axes(text, spec, in_turns=False), str, IMAGES)


def _without_sections(config: ConfigFile) -> ConfigFile:
    fields = dict(config.fields)
    for field in SECTIONS:
        section = config.section(field).fields
        if IN_SECTIONS in (section.get("type"), section.get("rope_type")):
            fields[field] = {**section, "type": "default", "rope_type": "default"}
    return ConfigFile(config.where, fields)
