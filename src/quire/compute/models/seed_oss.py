"""Seed-OSS: Llama with biases on query, key and value, and a separate size of heads."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, rotary_layers
from quire.compute.models.config_file import ConfigFile

DEFAULTS: Final = MappingProxyType({"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Seed-OSS model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    spec = llama_like(config, max_length, rotary_layers(config, max_length))
    return replace(
        spec,
        attention=replace(spec.attention, output_bias=config.flag("attention_out_bias", False)),
        mlp=replace(spec.mlp, bias=config.flag("mlp_bias", False)),
    )
