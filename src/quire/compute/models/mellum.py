"""Mellum 2: Qwen3-MoE with a window in three of four layers; only the other layers have scaled positions.

An MLP may take the place of the experts, by `mlp_layer_types`. Tensors that predict further tokens are not used.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import (
    head_dim,
    llama_like,
    mixed_windows,
    optional_window,
    with_head_norms,
    with_stems,
)
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.glm4_moe_lite import with_listed_experts
from quire.compute.models.qwen3_moe import STEMS, qwen_experts
from quire.compute.models.rope import full_and_sliding_ropes

BASE: Final = 500_000.0
LOCAL_BASE: Final = 10_000.0
DEFAULTS: Final = MappingProxyType(
    {
        **{"num_key_value_heads": 4, "head_dim": 128, "sliding_window": 1024, "num_experts": 64},
        **{"moe_intermediate_size": 896, "norm_topk_prob": True},
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Mellum model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    if config.is_set("rope_scaling"):
        raise config.error("rope_scaling", "null: each kind of layer has its own rope_parameters")
    windows = mixed_windows(config, optional_window(config), lambda layer: False)
    if any(windows) and not config.flag("use_sliding_window", True):
        raise config.error("use_sliding_window", "true or null with sliding layers")
    full, near = full_and_sliding_ropes(config, head_dim(config), max_length, base=BASE, sliding_base=LOCAL_BASE)
    layers = tuple(LayerSpec(each, full if each is None else near) for each in windows)
    spec = with_stems(with_head_norms(llama_like(config, max_length, layers)), STEMS)
    layers = with_listed_experts(config, tuple(replace(layer, sparse=True) for layer in layers))
    return replace(spec, layers=layers, experts=qwen_experts(config), ignored_prefixes=("mtp.",))
