"""Granite-MoE: Granite with experts instead of the MLP in each layer, in some models next to an MLP for every token.

Its checkpoints have all experts of a layer in one tensor, all gates before all ups; `unstacked` gives each expert its
own matrices. `intermediate_size` is the size of an expert, `shared_intermediate_size` that of the MLP.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models import granite
from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import LAYER, with_stems
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.mixtral import local_experts
from quire.compute.models.parts import Part, WeightSource

EXPERT: Final = LAYER + "block_sparse_moe.experts.{expert}."
STEMS: Final = MappingProxyType(
    {
        Part.ROUTER: LAYER + "block_sparse_moe.router.layer",
        Part.EXPERT_GATE: EXPERT + "gate_proj",
        Part.EXPERT_UP: EXPERT + "up_proj",
        Part.EXPERT_DOWN: EXPERT + "down_proj",
    }
)
SHARED: Final = LAYER + "shared_mlp."
SHARED_PARTS: Final = (Part.SHARED_GATE, Part.SHARED_UP, Part.SHARED_DOWN)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Granite-MoE model; refuses settings that quire does not interpret."""
    spec = with_stems(granite.decoder_spec(config, max_length), STEMS)
    size = config.size("shared_intermediate_size", 0, low=0)
    shared = mlp_sources(config, SHARED_PARTS, size)
    return replace(
        spec,
        sources=MappingProxyType({**spec.sources, **shared}),
        experts=replace(local_experts(config.over({"num_local_experts": 8})), shared_size=size),
        layers=tuple(replace(layer, sparse=True) for layer in spec.layers),
    )


def mlp_sources(config: ConfigFile, parts: tuple[Part, Part, Part], size: int) -> dict[Part, WeightSource]:
    """Return the sources of the gate and of the up projection, in one tensor or in two, and of the down projection."""
    stem = SHARED + "input_linear"
    sources = [WeightSource(stem), WeightSource(stem, first_row=size)]
    if config.flag("shared_mlp_split", False):  # in GGUF files
        sources = [WeightSource(SHARED + "gate_proj"), WeightSource(SHARED + "up_proj")]
    return dict(zip(parts, (*sources, WeightSource(SHARED + "output_linear")), strict=True))
