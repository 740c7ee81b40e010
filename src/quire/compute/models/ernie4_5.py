"""ERNIE 4.5: Llama with a separate size of heads, whose adjacent dimensions rotate."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, rotary_layers, with_adjacent_pairs
from quire.compute.models.config_file import ConfigFile

DEFAULTS: Final = MappingProxyType(
    {
        **{"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
        **{"rope_theta": 500_000.0, "tie_word_embeddings": True},
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of an ERNIE 4.5 model; refuses settings that quire does not interpret."""
    return ernie_like(config.over(DEFAULTS), max_length)


def ernie_like(config: ConfigFile, max_length: int | None) -> DecoderSpec:
    """Return the spec that models with and without experts share: pairs of adjacent dimensions, biases everywhere."""
    spec = with_adjacent_pairs(llama_like(config, max_length, rotary_layers(config, max_length)))
    bias = config.flag("use_bias", False)
    return replace(
        spec,
        attention=replace(spec.attention, bias=bias, output_bias=bias),
        mlp=replace(spec.mlp, bias=bias),
    )
