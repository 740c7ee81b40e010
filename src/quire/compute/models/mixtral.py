"""Mixtral: Mistral with experts instead of the MLP in each layer.

`intermediate_size` is the size of an expert. Published models have no window, which is also the default.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import (
    LAYER,
    llama_like,
    num_layers,
    optional_window,
    rotary_layers,
    same_windows,
    with_stems,
)
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import Part
from quire.compute.models.sublayers import MAX_EXPERTS, ExpertsSpec

DEFAULTS: Final = MappingProxyType(
    {"num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}
)
EXPERT: Final = LAYER + "block_sparse_moe.experts.{expert}."
STEMS: Final = MappingProxyType(
    {
        Part.ROUTER: LAYER + "block_sparse_moe.gate",
        Part.EXPERT_GATE: EXPERT + "w1",
        Part.EXPERT_UP: EXPERT + "w3",
        Part.EXPERT_DOWN: EXPERT + "w2",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Mixtral model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    windows = same_windows(config, optional_window(config))
    spec = llama_like(config, max_length, rotary_layers(config, max_length, windows))
    return replace(
        with_stems(spec, STEMS),
        experts=local_experts(config),
        layers=tuple(replace(layer, sparse=True) for layer in spec.layers),
    )


def local_experts(config: ConfigFile, field: str = "num_local_experts") -> ExpertsSpec:
    """Return experts of the size of an MLP, with weights that add up to 1; `field` has their number."""
    num_experts = config.size(field, high=MAX_EXPERTS // num_layers(config))
    return ExpertsSpec(
        num_experts=num_experts,
        experts_per_token=config.size("num_experts_per_tok", 2, high=num_experts),
        intermediate_size=config.size("intermediate_size"),
        normalize_weights=True,
    )
