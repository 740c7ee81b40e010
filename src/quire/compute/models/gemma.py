"""Gemma: Llama with norms that scale by 1 + w, a scaled embedding that is also the head, and a tanh GELU.

The first configs name the exact GELU by mistake (`hidden_act`); transformers computes the tanh approximation for them.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, rotary_layers
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.sublayers import Activation

DEFAULTS: Final = MappingProxyType({"head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True})
TANH: Final = "gelu_pytorch_tanh"


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Gemma model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    config.refuse("use_bidirectional_attention")
    config.require("hidden_act", "gelu", TANH, None)
    config.require("hidden_activation", TANH, None)
    spec = llama_like(config, max_length, rotary_layers(config, max_length))
    return replace(
        spec,
        norm=replace(spec.norm, unit_offset=config.flag("rms_norm_unit_offset", True)),  # GGUF files include the 1
        mlp=replace(spec.mlp, activation=Activation.GELU_TANH),
        embedding_scale=spec.hidden_size**0.5,
    )
