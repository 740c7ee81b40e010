"""Bamba: state-space layers (Mamba-2) in most layers, attention with half of each head rotating in the others."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import LAYER, llama_like, num_layers, rotary_layers, with_stems
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.mamba import mamba_rule, with_mamba
from quire.compute.models.parts import Part

DEFAULTS: Final = MappingProxyType({"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5})
FEED_FORWARD: Final = LAYER + "feed_forward."
STEMS: Final = MappingProxyType(
    {
        Part.MLP_NORM: LAYER + "pre_ff_layernorm",
        Part.GATE: FEED_FORWARD + "gate_proj",
        Part.UP: FEED_FORWARD + "up_proj",
        Part.DOWN: FEED_FORWARD + "down_proj",
        Part.FINAL_NORM: "model.final_layernorm",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Bamba model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    spec = with_stems(llama_like(config, max_length, rotary_layers(config, max_length, partial=True)), STEMS)
    spec = replace(spec, mlp=replace(spec.mlp, bias=config.flag("mlp_bias", False)))
    attention = config.indices("attn_layer_indices", num_layers(config))
    recurrent = [layer not in attention for layer in range(len(spec.layers))]
    return with_mamba(spec, mamba_rule(config, spec.norm), recurrent, LAYER + "mamba.") if any(recurrent) else spec
