"""StableLM: Llama with layer norms, and a quarter of each head that rotates; both sublayers may read the same rows.

A norm on every head (`qk_layernorm`, StableLM 2 12B) is refused: its weights are one tensor for each head.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, NormKind, NormSpec
from quire.compute.models.common import llama_like, rotary_layers
from quire.compute.models.config_file import ConfigFile

DEFAULTS: Final = MappingProxyType({"partial_rotary_factor": 0.25})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a StableLM model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    config.refuse("qk_layernorm")
    spec = llama_like(config, max_length, rotary_layers(config, max_length, partial=True))
    parallel = config.flag("use_parallel_residual", False)
    return replace(
        spec,
        norm=NormSpec(NormKind.LAYER, config.number("layer_norm_eps", 1e-5)),
        attention=replace(spec.attention, bias=config.flag("use_qkv_bias", False), output_bias=False),
        parallel=parallel,
        shared_norm=parallel,
    )
