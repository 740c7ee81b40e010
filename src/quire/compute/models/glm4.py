"""GLM-4: Llama with fused gate and up, biases on query, key and value; adjacent dimensions rotate, in half a head.

The later models (`Glm4ForCausalLM`, from GLM-4-0414 on) also have norms after each sublayer; the first ones
(`GlmForCausalLM`) do not, and their GGUF files may have query, key and value in one tensor.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import (
    LAYER,
    llama_like,
    rotary_layers,
    with_adjacent_pairs,
    with_fused_attention,
    with_fused_gate,
    with_stems,
)
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import Part

DEFAULTS: Final = MappingProxyType(
    {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
    }
)
AFTER: Final = MappingProxyType(
    {
        Part.AFTER_ATTENTION_NORM: LAYER + "post_self_attn_layernorm",
        Part.AFTER_MLP_NORM: LAYER + "post_mlp_layernorm",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a GLM-4 model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    spec = with_fused_gate(llama_like(config, max_length, rotary_layers(config, max_length, partial=True)))
    if config.flag("qkv_fused", False):
        spec = with_fused_attention(spec)
    spec = with_adjacent_pairs(replace(spec, attention=replace(spec.attention, output_bias=False)))
    if config.texts("architectures")[0] == "GlmForCausalLM":
        return spec
    return replace(with_stems(spec, AFTER), norm_after=True)
