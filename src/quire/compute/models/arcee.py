"""Arcee (AFM): Llama with a plain MLP, whose activation is the square of a ReLU."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, rotary_layers
from quire.compute.models.config_file import ConfigFile

DEFAULTS: Final = MappingProxyType({"rms_norm_eps": 1e-5, "hidden_act": "relu2"})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of an Arcee model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    spec = llama_like(config, max_length, rotary_layers(config, max_length))
    return replace(spec, mlp=replace(spec.mlp, gated=False, bias=config.flag("mlp_bias", False)))
