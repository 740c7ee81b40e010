"""Dots (dots.llm1): Qwen3 with experts in most layers, as in DeepSeek-V3, next to an MLP for every token."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models import deepseek
from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import (
    llama_like,
    mixed_windows,
    optional_window,
    rotary_layers,
    with_head_norms,
    with_stems,
)
from quire.compute.models.config_file import ConfigFile

PUBLISHED: Final = "noaux_tc"
"""The published name of the scoring by sigmoids."""

DEFAULTS: Final = MappingProxyType(
    {
        **{"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 62, "first_k_dense_replace": 0},
        **{"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Dots model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    first = config.size("max_window_layers", low=0)
    layers = rotary_layers(
        config, max_length, mixed_windows(config, optional_window(config), lambda layer: layer >= first)
    )
    if config.fields.get("scoring_func") == PUBLISHED:
        config = ConfigFile(config.where, {**config.fields, "scoring_func": "sigmoid"})
    spec = with_head_norms(with_stems(llama_like(config, max_length, layers), deepseek.STEMS))
    return replace(spec, layers=deepseek.sparse_after(config, spec.layers), experts=deepseek.v3_experts(config))
