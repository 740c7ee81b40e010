"""LFM2-MoE: LFM2 with experts after the first layers, weighed as in DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import with_stems
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.lfm2 import DEFAULTS as LFM2
from quire.compute.models.lfm2 import FEED_FORWARD, with_convolutions
from quire.compute.models.parts import Part
from quire.compute.models.sublayers import ExpertsSpec, Scoring

DEFAULTS: Final = MappingProxyType(
    {
        **LFM2,
        **{"hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2},
        **{"num_experts": 32, "num_experts_per_tok": 4, "routed_scaling_factor": 1.0},
    }
)
EXPERT: Final = FEED_FORWARD + "experts.{expert}."
STEMS: Final = MappingProxyType(
    {
        **{Part.ROUTER: FEED_FORWARD + "gate", Part.ROUTER_OFFSET: FEED_FORWARD + "expert_bias"},
        **{Part.EXPERT_GATE: EXPERT + "w1", Part.EXPERT_UP: EXPERT + "w3", Part.EXPERT_DOWN: EXPERT + "w2"},
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of an LFM2-MoE model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    spec = with_stems(with_convolutions(config, max_length), STEMS)
    num_dense = config.size("num_dense_layers", low=0)
    experts = ExpertsSpec(
        num_experts=config.size("num_experts"),
        experts_per_token=config.size("num_experts_per_tok"),
        intermediate_size=config.size("moe_intermediate_size"),
        normalize_weights=config.flag("norm_topk_prob", True),
        scoring=Scoring.SIGMOID,
        scale=config.number("routed_scaling_factor"),
        offset=config.flag("use_expert_bias", True),
    )
    layers = tuple(replace(layer, sparse=index >= num_dense) for index, layer in enumerate(spec.layers))
    return replace(spec, experts=experts, layers=layers)
