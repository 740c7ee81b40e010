"""Granite 4: Granite or Granite-MoE with other names, in those with an H state-space layers (Mamba-2) in most layers.

transformers calls the family GraniteMoeHybrid. Some models have no positions.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models import granite, granite_moe
from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import LAYER, num_layers
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.mamba import mamba_rule, with_mamba
from quire.compute.models.parts import Part

ROPE: Final = "rope"
RECURRENT: Final = MappingProxyType(
    {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}
)
"""The kinds of layers, with two names for each, and whether they have states."""


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Granite 4 model; refuses settings that quire does not interpret."""
    config = config.over({"shared_intermediate_size": 1024, "num_local_experts": 8})
    recurrent = _recurrent(config)
    config.require("position_embedding_type", ROPE, "nope", None)
    has_experts = config.size("num_local_experts", low=0) > 0
    spec = granite_moe.decoder_spec(config, max_length) if has_experts else _dense(config, max_length)
    if config.fields.get("position_embedding_type") != ROPE:
        spec = replace(spec, layers=tuple(replace(layer, rope=None) for layer in spec.layers))
    return with_mamba(spec, mamba_rule(config, spec.norm), recurrent, LAYER + "mamba.") if any(recurrent) else spec


def _dense(config: ConfigFile, max_length: int | None) -> DecoderSpec:
    """Return the spec of a model without experts: its MLP is the one that others have next to experts."""
    spec, size = granite.decoder_spec(config, max_length), config.size("shared_intermediate_size")
    own = granite_moe.mlp_sources(config, (Part.GATE, Part.UP, Part.DOWN), size)
    sources = MappingProxyType({**spec.sources, **own})
    return replace(spec, mlp=replace(spec.mlp, intermediate_size=size), sources=sources)


def _recurrent(config: ConfigFile) -> list[bool]:
    """Return whether each layer has states instead of attention; without a list, all do."""
    count = num_layers(config)
    kinds = config.texts("layer_types") if config.is_set("layer_types") else ("mamba",) * count
    if len(kinds) != count or not set(RECURRENT).issuperset(kinds):
        raise config.error("layer_types", f"{count} of mamba, attention")
    return [RECURRENT[kind] for kind in kinds]
