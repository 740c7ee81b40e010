"""Command R (Cohere): attention and MLP read the same rows, through one layer norm without bias; scaled logits.

Adjacent dimensions rotate as pairs, and the head is the embedding. Command R+ has a norm on every head, each with its
own weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import llama_like, rotary_layers, with_adjacent_pairs, with_head_norms
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormScope, NormSpec

DEFAULTS: Final = MappingProxyType({"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.0625})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Command R model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    return cohere_like(config, max_length, rotary_layers(config, max_length))


def cohere_like(config: ConfigFile, max_length: int | None, layers: Sequence[LayerSpec]) -> DecoderSpec:
    """Return the spec that Command R and R7B share."""
    spec = replace(
        llama_like(config, max_length, layers),
        norm=NormSpec(NormKind.LAYER, config.number("layer_norm_eps"), bias=False),
        parallel=True,
        shared_norm=True,
        logit_scale=config.number("logit_scale"),
    )
    if config.flag("use_qk_norm", False):
        spec = with_head_norms(spec)
        spec = replace(spec, attention=replace(spec.attention, qk_norm_scope=NormScope.EACH_HEAD))
    return with_adjacent_pairs(spec)
