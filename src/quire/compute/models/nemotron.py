"""Nemotron and Minitron: layer norms that scale by 1 + w, a plain MLP with a squared ReLU, half-rotating heads."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, rotary_layers
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormSpec

DEFAULTS: Final = MappingProxyType({"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Nemotron model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    spec = llama_like(config, max_length, rotary_layers(config, max_length, partial=True))
    has_offset = config.flag("norm_unit_offset", True)  # GGUF files include the 1
    return replace(
        spec,
        norm=NormSpec(NormKind.LAYER, config.number("norm_eps"), unit_offset=has_offset),
        mlp=replace(spec.mlp, gated=False, bias=config.flag("mlp_bias", False)),
    )
