"""ERNIE 4.5 with experts: ERNIE 4.5 with experts in most layers, next to an MLP for every token.

A number is added to the weight of each expert for the choice of a token's experts. Tensors that predict further tokens
are not used.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import LAYER, num_layers, with_stems
from quire.compute.models.config_file import MAX_SIZE, ConfigFile
from quire.compute.models.deepseek import STEMS as EXPERT_STEMS
from quire.compute.models.ernie4_5 import ernie_like
from quire.compute.models.parts import Part
from quire.compute.models.sublayers import MAX_EXPERTS, ExpertsSpec

DEFAULTS: Final = MappingProxyType(
    {
        **{"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True},
        **{"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2},
        **{"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
    }
)
STEMS: Final = MappingProxyType({**EXPERT_STEMS, Part.ROUTER_OFFSET: LAYER + "mlp.moe_statics.e_score_correction_bias"})
LEAST_SUM: Final = 1e-12
"""transformers divides a token's weights by at least this, which is far below their sum."""


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of an ERNIE 4.5 model with experts; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    if config.number("moe_norm_min", LEAST_SUM) > LEAST_SUM:
        raise config.error("moe_norm_min", f"at most {LEAST_SUM:g}")
    spec = with_stems(ernie_like(config, max_length), STEMS)
    return replace(
        spec,
        experts=_experts(config),
        layers=_with_sparse(config, spec.layers),
        head_bias=config.flag("use_bias", False),
        ignored_prefixes=("model.mtp",),
    )


def _experts(config: ConfigFile) -> ExpertsSpec:
    num_experts = config.size("moe_num_experts", high=MAX_EXPERTS // num_layers(config))
    size, num_shared = config.size("moe_intermediate_size"), config.size("moe_num_shared_experts", low=0)
    if size * num_shared > MAX_SIZE:
        raise config.error("moe_num_shared_experts", f"MLPs of {size} numbers that have at most {MAX_SIZE} together")
    return ExpertsSpec(
        num_experts=num_experts,
        experts_per_token=config.size("moe_k", high=num_experts),
        intermediate_size=size,
        normalize_weights=True,
        offset=True,
        shared_size=size * num_shared,
    )


def _with_sparse(config: ConfigFile, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Return the layers, every `moe_layer_interval`-th of a range with experts."""
    last, step = config.size("moe_layer_end_index", low=-1), config.size("moe_layer_interval")
    first, end = config.size("moe_layer_start_index", low=0), len(layers) if last == -1 else last + 1
    return tuple(
        replace(layer, sparse=first <= index < end and (index + 1) % step == 0) for index, layer in enumerate(layers)
    )
