"""Granite 4 without state-space layers: Granite or Granite-MoE with other names, in some models without positions.

transformers calls the family GraniteMoeHybrid. The models whose names have an H have state-space layers (Mamba), and
are refused.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models import granite, granite_moe
from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import num_layers
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import Part
from quire.core.errors import CheckpointError

ROPE: Final = "rope"


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Granite 4 model; refuses state-space layers and settings that quire does not interpret."""
    config = config.over({"shared_intermediate_size": 1024, "num_local_experts": 8})
    _require_attention(config)
    config.require("position_embedding_type", ROPE, "nope", None)
    has_experts = config.size("num_local_experts", low=0) > 0
    spec = granite_moe.decoder_spec(config, max_length) if has_experts else _dense(config, max_length)
    if config.fields.get("position_embedding_type") == ROPE:
        return spec
    return replace(spec, layers=tuple(replace(layer, rope=None) for layer in spec.layers))


def _dense(config: ConfigFile, max_length: int | None) -> DecoderSpec:
    """Return the spec of a model without experts: its MLP is the one that others have next to experts."""
    spec, size = granite.decoder_spec(config, max_length), config.size("shared_intermediate_size")
    sources = MappingProxyType({**spec.sources, **granite_moe.mlp_sources((Part.GATE, Part.UP, Part.DOWN), size)})
    return replace(spec, mlp=replace(spec.mlp, intermediate_size=size), sources=sources)


def _require_attention(config: ConfigFile) -> None:
    """Raise if a layer is not attention; without a list, no layer is."""
    kinds = config.texts("layer_types") if config.is_set("layer_types") else ("mamba",)
    others = sorted(set(kinds) - {"attention", "full_attention"})
    if others:
        allowed = "only attention layers, because quire has no state-space layers (Mamba)"
        raise CheckpointError(f"{config.where}: layer_types", ", ".join(others), allowed)
    if len(kinds) != num_layers(config):
        raise config.error("layer_types", f"{num_layers(config)} kinds")
