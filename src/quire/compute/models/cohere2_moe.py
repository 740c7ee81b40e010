"""Command A+ and North: Command R7B with experts in most layers, in some models next to an MLP for every token.

Experts are weighed by a softmax or one by one. Their sum and the output of that MLP are added or averaged. Layers
without experts can have another pattern of windows, and positions without a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.cohere import cohere_like
from quire.compute.models.cohere2 import DEFAULTS as COHERE2_DEFAULTS
from quire.compute.models.common import head_dim, mixed_windows, num_layers, with_stems
from quire.compute.models.config_file import MAX_LENGTH, MAX_SIZE, ConfigFile
from quire.compute.models.deepseek import STEMS as EXPERT_STEMS
from quire.compute.models.deepseek import sparse_after
from quire.compute.models.glm4_moe_lite import with_listed_experts
from quire.compute.models.parts import NormKind, NormSpec, Part
from quire.compute.models.rope import rope_spec
from quire.compute.models.sublayers import MAX_EXPERTS, ExpertsSpec, Scoring

TIED: Final = "tie_word_embeddings"
DENSE_SIZE: Final = "prefix_dense_intermediate_size"
SHARING: Final = "shared_expert_combination_strategy"
DEFAULTS: Final = MappingProxyType(
    {
        **COHERE2_DEFAULTS,
        **{"head_dim": 128, "first_k_dense_replace": 0, "prefix_dense_sliding_window_pattern": 1},
    }
)
STEMS: Final[Mapping[Part, str]] = MappingProxyType(
    {part: stem for part, stem in EXPERT_STEMS.items() if part is not Part.ROUTER_OFFSET}
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Cohere 2 model with experts; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    config.refuse("use_qk_norm")
    if not config.flag("use_parallel_block", True):
        raise config.error("use_parallel_block", "true: attention and MLP read the same rows")
    layers, experts = _layers(config, max_length), _experts(config)
    dense = config.size(DENSE_SIZE, experts.intermediate_size)
    changed = {TIED: config.flag(TIED, True), "intermediate_size": dense}
    config = ConfigFile(config.where, {**config.fields, **changed})
    spec = with_stems(cohere_like(config, max_length, [replace(each, sparse=False) for each in layers]), STEMS)
    if config.is_set("rms_norm_eps"):
        spec = replace(spec, norm=NormSpec(NormKind.RMS, config.number("rms_norm_eps")))
    if experts.scale != 1:
        down = replace(spec.sources[Part.SHARED_DOWN], factor=experts.scale)
        spec = replace(spec, sources=MappingProxyType({**spec.sources, Part.SHARED_DOWN: down}))
    return replace(spec, layers=layers, experts=experts)


def _layers(config: ConfigFile, max_length: int | None) -> tuple[LayerSpec, ...]:
    """Return the layers: those with a window have positions, and dense ones if their own pattern is 1."""
    num_dense = config.size("first_k_dense_replace", low=0, high=num_layers(config))
    pattern, of_dense = config.size("sliding_window_pattern"), config.size("prefix_dense_sliding_window_pattern")

    def is_sliding(layer: int) -> bool:
        return (layer + 1) % of_dense != 0 if layer < num_dense else (layer - num_dense + 1) % pattern != 0

    windows = mixed_windows(config, config.size("sliding_window", high=MAX_LENGTH), is_sliding)
    kinds = with_listed_experts(config, sparse_after(config, tuple(LayerSpec(each, None) for each in windows)))
    rope = rope_spec(config, head_dim(config), max_length)
    turns = [layer.window is not None or (not layer.sparse and of_dense == 1) for layer in kinds]
    if not any(turns):
        raise config.error("layer_types", "a sliding layer, because only those have positions")
    return tuple(replace(layer, rope=rope if turn else None) for layer, turn in zip(kinds, turns, strict=True))


def _experts(config: ConfigFile) -> ExpertsSpec:
    """Return the experts; `scale` is one half if they and the MLP for every token are averaged."""
    config.require("expert_selection_fn", "softmax", "sigmoid", None)
    config.require(SHARING, "average", "sum", None)
    num_experts = config.size("num_experts", 8, high=MAX_EXPERTS // num_layers(config))
    size, num_shared = config.size("intermediate_size"), config.size("num_shared_experts", 0, low=0)
    if size * num_shared > MAX_SIZE:
        raise config.error("num_shared_experts", f"MLPs of {size} numbers that have at most {MAX_SIZE} together")
    alone = config.fields.get("expert_selection_fn") == "sigmoid"
    return ExpertsSpec(
        num_experts=num_experts,
        experts_per_token=config.size("num_experts_per_tok", 2, high=num_experts),
        intermediate_size=size,
        normalize_weights=not alone or config.flag("norm_topk_prob", True),
        scoring=Scoring.SIGMOID if alone else Scoring.SOFTMAX,
        shared_size=size * num_shared,
        scale=0.5 if num_shared and config.fields.get(SHARING) != "sum" else 1.0,
    )
