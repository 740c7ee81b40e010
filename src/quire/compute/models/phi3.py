"""Phi-3, Phi-3.5 and Phi-4: Llama with fused weights, positions scaled by factors, and a window.

Query, key and value are one tensor, gate and up another. The scaling of positions is longrope, called "su" in the first
configs; the original length is a setting at the top level.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import (
    llama_like,
    optional_window,
    rotary_layers,
    same_windows,
    with_fused_attention,
    with_fused_gate,
)
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.compute.models.rope import SECTIONS

DEFAULTS: Final = MappingProxyType({"rms_norm_eps": 1e-5})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Phi-3 model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    for section in map(config.section, SECTIONS):
        for field in ("rope_type", "type"):
            section.require(field, "default", "longrope", "su", None)
            if section.fields.get(field) in ("longrope", "su"):
                section.over(config.fields).size("original_max_position_embeddings", high=MAX_LENGTH)
    windows = same_windows(config, optional_window(config))
    spec = llama_like(config, max_length, rotary_layers(config, max_length, windows, partial=True))
    return with_fused_gate(with_fused_attention(spec))
