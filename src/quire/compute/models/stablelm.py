"""StableLM: Llama with layer norms and a rotating quarter of each head; both sublayers can read the same rows.

StableLM 2 12B has a norm on every head (`qk_layernorm`), with a tensor of weights for each head.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import LAYER, llama_like, rotary_layers, with_stems
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormScope, NormSpec, Part

DEFAULTS: Final = MappingProxyType({"partial_rotary_factor": 0.25})
MAX_HEAD_NORMS: Final = 1 << 16  # each becomes a name
HEAD_NORMS: Final = MappingProxyType(
    {
        Part.QUERY_NORM: LAYER + "self_attn.q_layernorm.norms.{head}",
        Part.KEY_NORM: LAYER + "self_attn.k_layernorm.norms.{head}",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a StableLM model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    spec = llama_like(config, max_length, rotary_layers(config, max_length, partial=True))
    parallel, epsilon = config.flag("use_parallel_residual", False), config.number("layer_norm_eps", 1e-5)
    attention = replace(spec.attention, bias=config.flag("use_qkv_bias", False), output_bias=False)
    if config.flag("qk_layernorm", False):
        if len(spec.layers) * attention.num_heads > MAX_HEAD_NORMS:
            raise config.error("num_attention_heads", f"at most {MAX_HEAD_NORMS} over the layers, with qk_layernorm")
        spec = with_stems(spec, HEAD_NORMS)
        attention = replace(
            attention, qk_norm=NormSpec(NormKind.LAYER, epsilon, bias=False), qk_norm_scope=NormScope.EACH_HEAD
        )
    return replace(
        spec,
        norm=NormSpec(NormKind.LAYER, epsilon),
        attention=attention,
        parallel=parallel,
        shared_norm=parallel,
    )
