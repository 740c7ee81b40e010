"""Granite-MoE: Granite with experts instead of the MLP in each layer.

Its checkpoints have all experts of a layer in one tensor, all gates before all ups; `unstacked` gives each expert its
own matrices. `intermediate_size` is the size of an expert.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models import granite
from quire.compute.models.base import DecoderSpec, Part
from quire.compute.models.common import LAYER, with_stems
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.mixtral import local_experts

EXPERT: Final = LAYER + "block_sparse_moe.experts.{expert}."
STEMS: Final = MappingProxyType(
    {
        Part.ROUTER: LAYER + "block_sparse_moe.router.layer",
        Part.EXPERT_GATE: EXPERT + "gate_proj",
        Part.EXPERT_UP: EXPERT + "up_proj",
        Part.EXPERT_DOWN: EXPERT + "down_proj",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Granite-MoE model; refuses settings that quire does not interpret."""
    spec = granite.decoder_spec(config, max_length)
    return replace(
        with_stems(spec, STEMS),
        experts=local_experts(config.over({"num_local_experts": 8})),
        layers=tuple(replace(layer, sparse=True) for layer in spec.layers),
    )
