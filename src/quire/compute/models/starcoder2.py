"""StarCoder2: layer norms, biases, a plain MLP, and one window for all layers or none."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import (
    LAYER,
    activation,
    llama_like,
    optional_window,
    rotary_layers,
    same_windows,
    with_stems,
)
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormSpec, Part
from quire.compute.models.sublayers import MLPSpec

DEFAULTS: Final = MappingProxyType({"num_key_value_heads": 2, "tie_word_embeddings": True})
STEMS: Final = MappingProxyType({Part.UP: LAYER + "mlp.c_fc", Part.DOWN: LAYER + "mlp.c_proj"})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a StarCoder2 model; refuses settings that quire does not interpret."""
    config, bias = config.over(DEFAULTS), config.flag("use_bias", True)
    windows = same_windows(config, optional_window(config))
    spec = with_stems(llama_like(config, max_length, rotary_layers(config, max_length, windows)), STEMS)
    gelu = activation(config, "hidden_act", "gelu_pytorch_tanh")
    return replace(
        spec,
        norm=NormSpec(NormKind.LAYER, config.number("norm_epsilon", 1e-5)),
        attention=replace(spec.attention, bias=bias, output_bias=bias),
        mlp=MLPSpec(spec.mlp.intermediate_size, gelu, gated=False, bias=bias),
    )
