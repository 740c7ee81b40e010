"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts in some or all layers, next to an MLP with a weight for every token.

The sigmoid of a score is the weight of that MLP. Versions of transformers differ in the layers that have a window, so
a window is refused unless `layer_types` specifies them.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models import qwen3_moe
from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import LAYER, llama_like, mixed_windows, rotary_layers, with_stems
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import Part
from quire.compute.models.qwen2 import used_window

DEFAULTS: Final = MappingProxyType(
    {
        **{"num_key_value_heads": 16, "sliding_window": 4096, "num_experts": 60, "num_experts_per_tok": 4},
        **{"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    }
)
STEMS: Final = MappingProxyType(
    {
        **qwen3_moe.STEMS,
        Part.SHARED_ROUTER: LAYER + "mlp.shared_expert_gate",
        Part.SHARED_GATE: LAYER + "mlp.shared_expert.gate_proj",
        Part.SHARED_UP: LAYER + "mlp.shared_expert.up_proj",
        Part.SHARED_DOWN: LAYER + "mlp.shared_expert.down_proj",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Qwen2-MoE model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    window = used_window(config)
    if window is not None and not config.is_set("layer_types"):
        raise config.error("layer_types", "a list of layer types with a sliding window")
    windows = mixed_windows(config, window, lambda layer: False)
    spec = with_stems(llama_like(config, max_length, rotary_layers(config, max_length, windows)), STEMS)
    experts = replace(
        qwen3_moe.qwen_experts(config),
        shared_size=config.size("shared_expert_intermediate_size"),
        shared_router=True,
    )
    return replace(
        spec,
        attention=replace(spec.attention, bias=config.flag("qkv_bias", True), output_bias=False),
        experts=experts,
        layers=qwen3_moe.with_sparse(config, spec.layers),
    )
