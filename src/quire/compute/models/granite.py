"""Granite: Llama with factors for the embedding, the scores, the outputs of sublayers, and the logits."""

from __future__ import annotations

from dataclasses import replace

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, rotary_layers
from quire.compute.models.config_file import ConfigFile


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Granite model; refuses settings that quire does not interpret."""
    spec = llama_like(config, max_length, rotary_layers(config, max_length))
    return replace(
        spec,
        attention=replace(spec.attention, scale=config.number("attention_multiplier", 1.0)),
        mlp=replace(spec.mlp, bias=config.flag("mlp_bias", False)),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0),
    )
