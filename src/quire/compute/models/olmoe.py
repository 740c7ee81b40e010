"""OLMoE: Llama with experts instead of the MLP in each layer, and one norm each over all queries and all keys.

`intermediate_size` is the size of an expert. The weights of a token's experts keep the values of the softmax.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, rotary_layers, with_head_norms, with_stems
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.mixtral import local_experts
from quire.compute.models.parts import NormScope
from quire.compute.models.qwen3_moe import STEMS

DEFAULTS: Final = MappingProxyType({"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of an OLMoE model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    if config.is_set("clip_qkv"):
        raise config.error("clip_qkv", "null: no queries, keys and values are clipped")
    spec = with_head_norms(llama_like(config, max_length, rotary_layers(config, max_length)))
    return replace(
        with_stems(spec, STEMS),
        attention=replace(spec.attention, qk_norm_scope=NormScope.ALL_HEADS),
        experts=replace(local_experts(config, "num_experts"), normalize_weights=config.flag("norm_topk_prob", False)),
        layers=tuple(replace(layer, sparse=True) for layer in spec.layers),
    )
