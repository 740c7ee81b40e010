"""Phi-1, Phi-1.5 and Phi-2: attention and a plain MLP read the same rows through one layer norm; biases everywhere.

The head has a bias too. A norm on queries and keys (`qk_layernorm`) is refused: no published model has it.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import LAYER, activation, llama_like, rotary_layers, with_stems
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormSpec, Part
from quire.compute.models.sublayers import MLPSpec

DEFAULTS: Final = MappingProxyType({"partial_rotary_factor": 0.5})
STEMS: Final = MappingProxyType(
    {
        Part.OUTPUT: LAYER + "self_attn.dense",
        Part.UP: LAYER + "mlp.fc1",
        Part.DOWN: LAYER + "mlp.fc2",
        Part.FINAL_NORM: "model.final_layernorm",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Phi model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    config.refuse("qk_layernorm", "tie_word_embeddings")
    spec = with_stems(llama_like(config, max_length, rotary_layers(config, max_length, partial=True)), STEMS)
    gelu = activation(config, "hidden_act", "gelu_new")
    return replace(
        spec,
        norm=NormSpec(NormKind.LAYER, config.number("layer_norm_eps", 1e-5)),
        attention=replace(spec.attention, bias=True, output_bias=True),
        mlp=MLPSpec(spec.mlp.intermediate_size, gelu, gated=False, bias=True),
        parallel=True,
        shared_norm=True,
        head_bias=True,
    )
