"""Helium: Llama with a small epsilon, whose adjacent dimensions rotate."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, rotary_layers, with_adjacent_pairs
from quire.compute.models.config_file import ConfigFile

DEFAULTS: Final = MappingProxyType(
    {"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100_000.0}
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Helium model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    spec = with_adjacent_pairs(llama_like(config, max_length, rotary_layers(config, max_length)))
    return replace(
        spec,
        attention=replace(spec.attention, output_bias=False),
        mlp=replace(spec.mlp, bias=config.flag("mlp_bias", False)),
    )
