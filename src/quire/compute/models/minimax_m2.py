"""MiniMax-M2: Llama with experts in each layer, one norm each over all queries and all keys, and half-rotating heads.

Each expert is weighed alone, as in DeepSeek-V3. Tensors that predict further tokens are not used.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import LAYER, head_dim, llama_like, rotary_layers, with_head_norms, with_stems
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.mixtral import STEMS as EXPERT_STEMS
from quire.compute.models.mixtral import local_experts
from quire.compute.models.parts import NormScope, Part
from quire.compute.models.sublayers import Scoring

DEFAULTS: Final = MappingProxyType(
    {
        **{"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5_000_000.0},
        **{"num_local_experts": 256, "num_experts_per_tok": 8},
    }
)
STEMS: Final = MappingProxyType(
    {**EXPERT_STEMS, Part.ROUTER_OFFSET: LAYER + "block_sparse_moe.e_score_correction_bias"}
)
FULL: Final = 1
"""The number of full attention in `attn_type_list`; 0 is linear attention, as in MiniMax-01."""


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a MiniMax-M2 model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    config.require("scoring_func", "sigmoid", None)
    config.require("qk_norm_type", "per_layer", None)
    config.refuse("attention_bias")
    if config.size("shared_intermediate_size", 0, low=0):
        raise config.error("shared_intermediate_size", "0 or null: no MLP next to experts is run")
    kinds = config.fields.get("attn_type_list")
    if kinds is not None and not (isinstance(kinds, list) and all(kind == FULL for kind in kinds)):
        raise config.error("attn_type_list", "null, or 1 for each layer: no linear attention is run")
    if config.is_set("rotary_dim"):
        part = config.size("rotary_dim", high=head_dim(config)) / head_dim(config)
        config = ConfigFile(config.where, {**config.fields, "partial_rotary_factor": part})
    spec = with_head_norms(llama_like(config, max_length, rotary_layers(config, max_length, partial=True)))
    return replace(
        with_stems(spec, STEMS),
        attention=replace(spec.attention, qk_norm_scope=NormScope.ALL_HEADS),
        experts=replace(local_experts(config), scoring=Scoring.SIGMOID, offset=config.flag("use_routing_bias", True)),
        layers=tuple(replace(layer, sparse=True) for layer in spec.layers),
        ignored_prefixes=("model.mtp",),
    )
