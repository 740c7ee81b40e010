"""Qwen3-MoE: Qwen3 with experts instead of the MLP, in some or all layers.

transformers 5 calls `num_experts` `num_local_experts` and stacks the experts in memory, but saves them
like transformers 4: each separately. A window applies to every layer; versions of transformers differ in
`max_window_layers` here, so it is refused if a window is in use.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import (
    LAYER,
    llama_like,
    num_layers,
    rotary_layers,
    same_windows,
    with_head_norms,
    with_stems,
)
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import Part
from quire.compute.models.qwen2 import used_window
from quire.compute.models.sublayers import MAX_EXPERTS, ExpertsSpec

DEFAULTS: Final = MappingProxyType({"num_key_value_heads": 4, "sliding_window": 4096})
EXPERT: Final = LAYER + "mlp.experts.{expert}."
STEMS: Final = MappingProxyType(
    {
        Part.ROUTER: LAYER + "mlp.gate",
        Part.EXPERT_GATE: EXPERT + "gate_proj",
        Part.EXPERT_UP: EXPERT + "up_proj",
        Part.EXPERT_DOWN: EXPERT + "down_proj",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Qwen3-MoE model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    window = used_window(config)
    if window is not None and config.size("max_window_layers", 0, low=0):
        raise config.error("max_window_layers", "0 or null with a sliding window, which applies to all layers")
    spec = with_head_norms(
        llama_like(config, max_length, rotary_layers(config, max_length, same_windows(config, window)))
    )
    return replace(with_stems(spec, STEMS), experts=qwen_experts(config), layers=with_sparse(config, spec.layers))


def qwen_experts(config: ConfigFile) -> ExpertsSpec:
    """Return the experts that Qwen2-MoE and Qwen3-MoE share."""
    field = "num_local_experts" if config.is_set("num_local_experts") else "num_experts"
    num_experts = config.size(field, 128, high=MAX_EXPERTS // num_layers(config))
    return ExpertsSpec(
        num_experts=num_experts,
        experts_per_token=config.size("num_experts_per_tok", 8, high=num_experts),
        intermediate_size=config.size("moe_intermediate_size", 768),
        normalize_weights=config.flag("norm_topk_prob", False),
    )


def with_sparse(config: ConfigFile, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Return the layers, every `decoder_sparse_step`-th with experts, except `mlp_only_layers`."""
    step = config.size("decoder_sparse_step", 1)
    sparse = set(range(step - 1, len(layers), step)) - config.indices("mlp_only_layers", len(layers))
    return tuple(replace(layer, sparse=index in sparse) for index, layer in enumerate(layers))
