"""Llama 4: chunks of attention, every fourth layer without positions, and experts whose inputs are weighed.

In layers with positions, a token attends to the earlier tokens of its own chunk, and heads are normalised after they
rotate, without weights. The other layers attend to the whole text, by queries that grow with their position. A layer
has experts next to an MLP for every token, or a larger MLP.

The models are published with an encoder of images, whose weights are ignored.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import (
    LAYER,
    head_dim,
    llama_like,
    num_layers,
    with_adjacent_pairs,
    with_head_norms,
    with_stems,
)
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.compute.models.multimodal import text_config, with_other_tensors
from quire.compute.models.parts import Part
from quire.compute.models.rope import FULL, MAX_GROWTH, rope_spec
from quire.compute.models.sublayers import MAX_EXPERTS, ExpertsSpec, RopeSpec, Scoring

CHUNKED: Final = "chunked_attention"
BASE: Final = 500_000.0
DEFAULTS: Final = MappingProxyType(
    {
        **{"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072},
        **{"intermediate_size_mlp": 16_384, "num_local_experts": 16, "num_experts_per_tok": 1},
        **{"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True},
    }
)
EXPERT: Final = LAYER + "feed_forward.experts.{expert}."
SHARED: Final = LAYER + "feed_forward.shared_expert."
STEMS: Final = MappingProxyType(
    {
        Part.GATE: LAYER + "feed_forward.gate_proj",
        Part.UP: LAYER + "feed_forward.up_proj",
        Part.DOWN: LAYER + "feed_forward.down_proj",
        Part.ROUTER: LAYER + "feed_forward.router",
        Part.SHARED_GATE: SHARED + "gate_proj",
        Part.SHARED_UP: SHARED + "up_proj",
        Part.SHARED_DOWN: SHARED + "down_proj",
        Part.EXPERT_GATE: EXPERT + "gate_proj",
        Part.EXPERT_UP: EXPERT + "up_proj",
        Part.EXPERT_DOWN: EXPERT + "down_proj",
        **dict.fromkeys((Part.QUERY_NORM, Part.KEY_NORM), ""),
    }
)
TEXT: Final = "language_model."
IMAGES: Final = ("multi_modal_projector.", "vision_model.")


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Llama 4 model, or of its text model; refuses settings that quire does not interpret."""
    if not config.is_set("text_config"):
        return _text_spec(config.over(DEFAULTS), max_length)
    return with_other_tensors(_text_spec(text_config(config).over(DEFAULTS), max_length), TEXT.__add__, IMAGES)


def _text_spec(config: ConfigFile, max_length: int | None) -> DecoderSpec:
    size, sparse = config.size("intermediate_size"), _sparse_layers(config)
    config = ConfigFile(config.where, {**config.fields, "intermediate_size": config.size("intermediate_size_mlp")})
    spec = with_stems(with_head_norms(llama_like(config, max_length, _layers(config, max_length))), STEMS)
    return with_adjacent_pairs(
        replace(
            spec,
            layers=tuple(replace(layer, sparse=index in sparse) for index, layer in enumerate(spec.layers)),
            attention=replace(spec.attention, rotates_first=True, chunked=True),
            experts=_experts(config, size) if sparse else None,
        )
    )


def _layers(config: ConfigFile, max_length: int | None) -> list[LayerSpec]:
    rope = rope_spec(config, head_dim(config), max_length, default_base=BASE)
    turns, grown, has_norms = _turning_layers(config), _growing_rope(config), config.flag("use_qk_norm", True)
    return [
        LayerSpec(chunk, rope if turn else grown, head_norms=turn and has_norms)
        for chunk, turn in zip(_chunks(config, turns), turns, strict=True)
    ]


def _turning_layers(config: ConfigFile) -> list[bool]:
    """Return for each layer whether it has rotary positions: a 1 in `no_rope_layers`, in spite of its name."""
    count, listed = num_layers(config), config.fields.get("no_rope_layers")
    if not listed:
        interval = config.size("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(count)]
    if not isinstance(listed, list) or len(listed) < count or not all(item in (0, 1) for item in listed):
        raise config.error("no_rope_layers", f"a list of 0 and 1 for {count} layers")
    return [bool(item) for item in listed[:count]]


def _sparse_layers(config: ConfigFile) -> frozenset[int]:
    """Return the layers with experts."""
    count = num_layers(config)
    if isinstance(config.fields.get("moe_layers"), list):
        return config.indices("moe_layers", count)
    step = config.size("interleave_moe_layer_step", 1)
    return frozenset(range(step - 1, count, step))


def _chunks(config: ConfigFile, turns: list[bool]) -> list[int | None]:
    """Return the size of the chunks of each layer; None: it attends to the whole text."""
    size = config.size("attention_chunk_size", high=MAX_LENGTH) if config.is_set("attention_chunk_size") else None
    if not config.is_set("layer_types"):
        return [size if turn else None for turn in turns]
    kinds = config.texts("layer_types")
    if len(kinds) != len(turns) or not {FULL, CHUNKED}.issuperset(kinds) or (size is None and CHUNKED in kinds):
        raise config.error("layer_types", f"{len(turns)} of {FULL}, {CHUNKED}, the latter with attention_chunk_size")
    return [size if kind == CHUNKED else None for kind in kinds]


def _growing_rope(config: ConfigFile) -> RopeSpec | None:
    """Return the growth of queries in layers without positions; the first folders have a number that turns it on."""
    if config.fields["attn_temperature_tuning"] in (False, 0, None):
        return None
    growth = config.optional_number("attn_scale", low=0, high=MAX_GROWTH)
    length = config.size("floor_scale", high=MAX_LENGTH)
    return (
        RopeSpec(0, (), query_growth=float(np.float32(growth)), growth_length=length, growth_offset=1)
        if growth
        else None
    )


def _experts(config: ConfigFile, size: int) -> ExpertsSpec:
    num_experts = config.size("num_local_experts", high=MAX_EXPERTS // num_layers(config))
    return ExpertsSpec(
        num_experts=num_experts,
        experts_per_token=config.size("num_experts_per_tok", high=num_experts),
        intermediate_size=size,
        normalize_weights=False,
        scoring=Scoring.SIGMOID,
        shared_size=size,
        weighs_inputs=True,
    )
