"""Hunyuan (dense): Llama with an RMS norm on every query and key head, after they rotate.

Its settings name the scaling of positions `dynamic`, but `alpha` alone gives the base, whatever the length.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import LAYER, llama_like, rotary_layers, with_head_norms, with_stems
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import Part
from quire.compute.models.rope import SECTIONS

DEFAULTS: Final = MappingProxyType({"rms_norm_eps": 1e-5})
DYNAMIC: Final = "dynamic"
STEMS: Final = MappingProxyType(
    {Part.QUERY_NORM: LAYER + "self_attn.query_layernorm", Part.KEY_NORM: LAYER + "self_attn.key_layernorm"}
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Hunyuan model; refuses settings that quire does not interpret."""
    config = _with_alpha(config.over(DEFAULTS))
    config.refuse("use_cla")
    spec = with_stems(with_head_norms(llama_like(config, max_length, rotary_layers(config, max_length))), STEMS)
    return replace(spec, attention=replace(spec.attention, rotates_first=True))


def _with_alpha(config: ConfigFile) -> ConfigFile:
    """Return the settings with the scaling that the others know as `alpha`."""
    fields = dict(config.fields)
    for field in SECTIONS:
        section = config.section(field)
        if section.is_set("alpha") and DYNAMIC in (section.fields.get("type"), section.fields.get("rope_type")):
            fields[field] = {**section.fields, "type": "alpha", "rope_type": "alpha"}
    return ConfigFile(config.where, fields)
