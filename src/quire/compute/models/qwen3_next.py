"""Qwen3-Next: linear attention in three of four layers, attention with a gate in the others, experts in most.

Every norm scales by 1 + w, except that of a recurrent layer. A quarter of each head rotates. The query projection has
the gate of each head after its query. Most layers have experts next to an MLP with a weight for every token, as in
Qwen2-MoE. A layer that guesses the next tokens has names with `mtp.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models import qwen3_moe
from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import (
    LAYER,
    MAX_HEAD_DIM,
    MAX_HEADS,
    llama_like,
    rotary_layers,
    with_head_norms,
    with_stems,
)
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.deepseek import without_further_layers
from quire.compute.models.guess_layer import with_guess_layer
from quire.compute.models.parts import NormSpec, Part, WeightSource
from quire.compute.models.qwen2_moe import STEMS as EXPERT_STEMS
from quire.compute.models.recurrent import DeltaSpec
from quire.compute.models.rope import FULL

LINEAR: Final = "linear_attention"
DELTA: Final = LAYER + "linear_attn."
MAX_FILTER: Final = 64
GUESSING: Final = ("mtp.",)
GUESS_LAYER: Final = "mtp.layers.0."
GUESS_STEMS: Final = MappingProxyType(
    {
        Part.TOKEN_NORM: "mtp.pre_fc_norm_embedding",
        Part.STATE_NORM: "mtp.pre_fc_norm_hidden",
        Part.EMBEDDING_IN: "mtp.fc",
        Part.FINAL_NORM: "mtp.norm",
    }
)
DEFAULTS: Final = MappingProxyType(
    {
        **{"num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4},
        **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
        **{"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
        **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    }
)
STEMS: Final = MappingProxyType(
    {
        Part.DELTA_FILTER: DELTA + "conv1d",
        Part.DELTA_LOG_DECAY: DELTA + "A_log",
        Part.DELTA_DECAY_OFFSET: DELTA + "dt_bias",
        Part.DELTA_NORM: DELTA + "norm",
        Part.DELTA_OUTPUT: DELTA + "out_proj",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Qwen3-Next model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    spec = with_experts(with_gated_attention(config, max_length), config)
    delta = delta_rule(config, spec.norm)
    is_split = config.flag("qkvz_split", False)  # in GGUF files
    return with_recurrent_layers(spec, config, delta, (_split_rows if is_split else _alternating_rows)(delta))


def with_gated_attention(config: ConfigFile, max_length: int | None) -> DecoderSpec:
    """Return the spec that Qwen3-Next and Qwen3.5 share, as if each layer had attention."""
    spec = llama_like(config, max_length, rotary_layers(config, max_length, partial=True))
    has_offset = config.flag("rms_norm_unit_offset", True)  # GGUF files include the 1
    spec = with_head_norms(replace(spec, norm=replace(spec.norm, unit_offset=has_offset)))
    query, size = spec.sources[Part.QUERY], spec.attention.head_dim
    by_turns = {
        Part.QUERY: replace(query, run=size, period=2 * size),
        Part.ATTENTION_GATE: replace(query, first_row=size, run=size, period=2 * size),
    }
    return replace(
        spec,
        attention=replace(spec.attention, gated=True),
        sources=MappingProxyType({**spec.sources, **by_turns}),
        ignored_prefixes=GUESSING,
    )


def with_experts(spec: DecoderSpec, config: ConfigFile) -> DecoderSpec:
    """Return the spec with experts in most layers, next to an MLP with a weight for every token."""
    experts = replace(
        qwen3_moe.qwen_experts(config),
        shared_size=config.size("shared_expert_intermediate_size"),
        shared_router=True,
    )
    return replace(with_stems(spec, EXPERT_STEMS), experts=experts, layers=qwen3_moe.with_sparse(config, spec.layers))


def delta_rule(config: ConfigFile, norm: NormSpec) -> DeltaSpec:
    """Return the settings of linear attention."""
    config.require("hidden_act", "silu", None)  # also the activation of the filter
    return DeltaSpec(
        num_heads=config.size("linear_num_value_heads", high=MAX_HEADS),
        num_key_heads=config.size("linear_num_key_heads", high=MAX_HEADS),
        key_dim=config.size("linear_key_head_dim", high=MAX_HEAD_DIM),
        value_dim=config.size("linear_value_head_dim", high=MAX_HEAD_DIM),
        filter_width=config.size("linear_conv_kernel_dim", high=MAX_FILTER),
        norm=replace(norm, unit_offset=False),
        outputs_in_turns=config.flag("linear_outputs_in_turns", False),  # in GGUF files
    )


def with_recurrent_layers(
    spec: DecoderSpec, config: ConfigFile, delta: DeltaSpec, rows: Mapping[Part, WeightSource]
) -> DecoderSpec:
    """Return the spec with linear attention in most layers; `rows`: the sources of products with hidden states."""
    spec = with_stems(spec, STEMS)
    layers = tuple(
        replace(layer, rope=None, recurrent=True) if is_recurrent else layer
        for layer, is_recurrent in zip(spec.layers, _recurrent(config, len(spec.layers)), strict=True)
    )
    spec = replace(spec, delta=delta, layers=layers, sources=MappingProxyType({**spec.sources, **rows}))
    spec = without_further_layers(config, spec)
    if spec.guess_sources or config.flag("mtp_use_dedicated_embeddings", False):  # names of GGUF, or another head
        return spec
    return with_guess_layer(spec, GUESS_LAYER, GUESS_STEMS)


def _recurrent(config: ConfigFile, count: int) -> list[bool]:
    """Return whether each layer is recurrent: by `layer_types`, or else all but each fourth."""
    if not config.is_set("layer_types"):
        interval = config.size("full_attention_interval", high=count)
        return [bool((index + 1) % interval) for index in range(count)]
    kinds = config.texts("layer_types")
    if len(kinds) != count or not {FULL, LINEAR}.issuperset(kinds):
        raise config.error("layer_types", f"{count} of {FULL}, {LINEAR}")
    return [kind == LINEAR for kind in kinds]


def _alternating_rows(delta: DeltaSpec) -> Mapping[Part, WeightSource]:
    """Return the sources of products: queries, keys, values and gates by turns for each key head; rates and decays."""
    key, values = delta.key_dim, delta.heads_per_key * delta.value_dim
    runs = {Part.DELTA_QUERY: key, Part.DELTA_KEY: key, Part.DELTA_VALUE: values, Part.DELTA_GATE: values}
    return _by_turns("in_proj_qkvz", runs) | _rates(delta)


def _split_rows(delta: DeltaSpec) -> Mapping[Part, WeightSource]:
    """Return the same sources, with queries, keys and values one after another, and gates in a tensor of their own."""
    return consecutive_rows(delta) | _rates(delta)


def consecutive_rows(delta: DeltaSpec) -> dict[Part, WeightSource]:
    """Return the sources of queries, keys and values, which follow one another in one tensor, and of gates."""
    keys = delta.num_key_heads * delta.key_dim
    return {
        Part.DELTA_QUERY: WeightSource(DELTA + "in_proj_qkv"),
        Part.DELTA_KEY: WeightSource(DELTA + "in_proj_qkv", first_row=keys),
        Part.DELTA_VALUE: WeightSource(DELTA + "in_proj_qkv", first_row=2 * keys),
        Part.DELTA_GATE: WeightSource(DELTA + "in_proj_z"),
    }


def _rates(delta: DeltaSpec) -> dict[Part, WeightSource]:
    """Return the sources of rates and decays, by turns for each key head."""
    return _by_turns("in_proj_ba", dict.fromkeys((Part.DELTA_RATE, Part.DELTA_DECAY), delta.heads_per_key))


def _by_turns(tensor: str, runs: Mapping[Part, int]) -> dict[Part, WeightSource]:
    """Return the sources of parts whose rows alternate in one tensor."""
    sources, first, period = {}, 0, sum(runs.values())
    for part, run in runs.items():
        sources[part] = WeightSource(DELTA + tensor, first_row=first, run=run, period=period)
        first += run
    return sources
