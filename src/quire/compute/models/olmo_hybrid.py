"""OLMo Hybrid: linear attention in three of four layers, attention as in OLMo 2 without positions in the others.

Layers with linear attention have norms before their sublayers, the others after them. Rates are up to 2.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import MAX_HEADS, head_dim, llama_like, num_layers, with_head_norms, with_stems
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.olmo2 import STEMS as NORMS
from quire.compute.models.parts import NormKind, NormScope, NormSpec, Part
from quire.compute.models.qwen3_next import DELTA, LINEAR, delta_rule
from quire.compute.models.rope import FULL, SECTIONS, rope_spec
from quire.compute.models.sublayers import RopeSpec

OUTPUT_NORM: Final = NormSpec(NormKind.RMS, 1e-5)  # not among the settings
DEFAULTS: Final = MappingProxyType({"max_position_embeddings": 65_536, "linear_conv_kernel_dim": 4})
STEMS: Final = MappingProxyType(
    {
        **NORMS,
        **{Part.DELTA_QUERY: DELTA + "q_proj", Part.DELTA_KEY: DELTA + "k_proj", Part.DELTA_VALUE: DELTA + "v_proj"},
        **{Part.DELTA_GATE: DELTA + "g_proj", Part.DELTA_RATE: DELTA + "b_proj", Part.DELTA_DECAY: DELTA + "a_proj"},
        **{Part.DELTA_FILTER: DELTA + "conv1d", Part.DELTA_LOG_DECAY: DELTA + "A_log"},
        **{Part.DELTA_DECAY_OFFSET: DELTA + "dt_bias", Part.DELTA_NORM: DELTA + "o_norm"},
        Part.DELTA_OUTPUT: DELTA + "o_proj",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of an OLMo Hybrid model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    kinds, rope = _kinds(config), _rope(config, max_length)
    layers = [
        LayerSpec(None, None, recurrent=True) if kind == LINEAR else LayerSpec(None, rope, norms_after=True)
        for kind in kinds
    ]
    spec = with_stems(with_head_norms(llama_like(config, max_length, [])), STEMS)
    rule = delta_rule(_with_sizes(config, spec.hidden_size), OUTPUT_NORM)
    return replace(
        spec,
        layers=tuple(layers),
        attention=replace(spec.attention, qk_norm_scope=NormScope.ALL_HEADS),
        delta=replace(rule, rate_scale=2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0),
    )


def _kinds(config: ConfigFile) -> list[str]:
    """Return the kind of each layer: each fourth has attention, in a small model the last one."""
    count = num_layers(config)
    if not config.is_set("layer_types"):
        kinds = [LINEAR if (layer + 1) % 4 else FULL for layer in range(count)]
        return kinds if FULL in kinds else [*kinds[:-1], FULL]
    kinds = list(config.texts("layer_types"))
    if len(kinds) != count or set(kinds) != {FULL, LINEAR}:
        raise config.error("layer_types", f"{count} of {FULL} and {LINEAR}, both")
    return kinds


def _rope(config: ConfigFile, max_length: int | None) -> RopeSpec | None:
    """Return the positions of attention; published models have none, and say so by a base of null."""
    sections = [config.section(name).fields for name in SECTIONS]
    if any(fields.get("rope_theta", 0) is None for fields in sections):
        return None
    return rope_spec(config, head_dim(config), max_length)


def _with_sizes(config: ConfigFile, hidden_size: int) -> ConfigFile:
    """Return the settings with the sizes of linear attention, which follow from others."""
    heads = config.size("num_attention_heads", high=MAX_HEADS)
    keys = config.size("linear_num_key_heads", heads, high=MAX_HEADS)
    key = config.size("linear_key_head_dim", max(3 * hidden_size // (4 * keys), 1))
    sizes = {
        **{"linear_num_key_heads": keys, "linear_key_head_dim": key},
        "linear_num_value_heads": config.size("linear_num_value_heads", heads, high=MAX_HEADS),
        "linear_value_head_dim": config.size("linear_value_head_dim", 2 * key),
    }
    return ConfigFile(config.where, {**config.fields, **sizes})
