"""Mamba-2: state-space layers only, without attention and MLPs; a state takes the place of keys and values."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import MAX_HEAD_DIM, MAX_HEADS, llama_like, num_layers, stem_sources
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.mamba import MAX_FILTER, require_no_limits, with_mamba
from quire.compute.models.nemotron_h import LAYER, MIXER, PREFIX
from quire.compute.models.parts import NormSpec, Part
from quire.compute.models.recurrent import MambaSpec

DEFAULTS: Final = MappingProxyType(
    {
        **{"vocab_size": 32_768, "hidden_size": 4096, "num_hidden_layers": 64, "layer_norm_epsilon": 1e-5},
        **{"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4, "expand": 2},
        "max_position_embeddings": 1 << 20,  # a state has no limit
    }
)
ABSENT: Final = MappingProxyType({"num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 1})
"""Settings of sublayers that no layer has."""

STEMS: Final = MappingProxyType(
    {
        **{Part.EMBEDDING: PREFIX + "embeddings", Part.FINAL_NORM: PREFIX + "norm_f", Part.HEAD: "lm_head"},
        Part.ATTENTION_NORM: LAYER + "norm",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Mamba-2 model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    config.refuse("use_bias")
    usual = {**ABSENT, "head_dim": 1, "rms_norm_eps": config.number("layer_norm_epsilon"), "hidden_act": None}
    layers = [LayerSpec(None, None, transforms=False, recurrent=True)] * num_layers(config)
    spec = llama_like(ConfigFile(config.where, {**config.fields, **usual}), max_length, [])
    spec = replace(spec, sources=stem_sources(STEMS), optional_prefix=PREFIX)
    return replace(with_mamba(spec, _rule(config, spec.norm), [], MIXER), layers=tuple(layers))


def _rule(config: ConfigFile, norm: NormSpec) -> MambaSpec:
    config.require("hidden_act", "silu", None)
    require_no_limits(config)
    width = config.size("hidden_size") * config.size("expand", high=MAX_HEAD_DIM)
    heads, size = config.size("num_heads", high=MAX_HEADS), config.size("head_dim", high=MAX_HEAD_DIM)
    if heads * size != width:
        raise config.error("num_heads", f"a number of heads of {size} that fill {width}, expand times hidden_size")
    return MambaSpec(
        num_heads=heads,
        num_groups=config.size("n_groups", high=MAX_HEADS),
        key_dim=config.size("state_size", high=MAX_HEAD_DIM),
        value_dim=size,
        filter_width=config.size("conv_kernel", high=MAX_FILTER),
        norm=norm,
        filter_bias=config.flag("use_conv_bias", True),
    )
