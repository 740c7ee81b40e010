"""Jais 2: Llama with layer norms, biases everywhere, and a plain MLP with a squared ReLU."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, rotary_layers
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormSpec

DEFAULTS: Final = MappingProxyType(
    {"attention_bias": True, "hidden_act": "relu2", "layer_norm_eps": 1e-5, "mlp_bias": True}
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Jais 2 model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    spec = llama_like(config, max_length, rotary_layers(config, max_length))
    return replace(
        spec,
        norm=NormSpec(NormKind.LAYER, config.number("layer_norm_eps")),
        mlp=replace(spec.mlp, gated=False, bias=config.flag("mlp_bias", True)),
    )
