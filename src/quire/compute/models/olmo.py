"""OLMo 1: Llama with layer norms that have neither weights nor biases."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, rotary_layers
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormSpec, Part, WeightSource

EPSILON: Final = 1e-5
NORMS: Final = (Part.ATTENTION_NORM, Part.MLP_NORM, Part.FINAL_NORM)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of an OLMo model; refuses settings that quire does not interpret."""
    if config.is_set("clip_qkv"):
        raise config.error("clip_qkv", "null: no queries, keys and values are clipped")
    spec = llama_like(config, max_length, rotary_layers(config, max_length))
    ones = dict.fromkeys(NORMS, WeightSource(""))
    return replace(
        spec,
        norm=NormSpec(NormKind.LAYER, EPSILON, bias=False),
        sources=MappingProxyType({**spec.sources, **ones}),
    )
