"""LFM3: LFM2's short convolutions, attention with windows and a gate for each head, norms around each sublayer.

Only a part of each head rotates in layers with full attention. A gate is one number for all numbers of a head.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models import lfm2
from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import LAYER, head_dim, llama_like, num_layers, with_head_norms, with_stems
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.compute.models.lfm2 import CONVOLUTION, CONVOLUTION_LAYER
from quire.compute.models.parts import Part, WeightSource
from quire.compute.models.rope import FULL, FULL_BASE, LOCAL_BASE, SLIDING, full_and_sliding_ropes

ROPES: Final = MappingProxyType(
    {
        SLIDING: {"rope_type": "default", "rope_theta": LOCAL_BASE},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": FULL_BASE},
    }
)
DEFAULTS: Final = MappingProxyType(
    {
        **{"vocab_size": 128_000, "hidden_size": 2048, "intermediate_size": 7680, "num_hidden_layers": 24},
        **{"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "sliding_window": 256},
        **{"max_position_embeddings": 128_000, "conv_L_cache": 7, "tie_word_embeddings": True},
    }
)
STEMS: Final = MappingProxyType(
    {
        **lfm2.STEMS,
        Part.AFTER_ATTENTION_NORM: LAYER + "post_operator_norm",
        Part.AFTER_MLP_NORM: LAYER + "post_ffn_norm",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of an LFM3 model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    config.refuse("attention_bias", "conv_bias")
    config.require("hidden_act", "silu", None)
    epsilon = config.number("norm_eps", config.number("rms_norm_eps", 1e-5))
    ropes = config.fields["rope_parameters"] if config.is_set("rope_parameters") else dict(ROPES)
    config = ConfigFile(config.where, {**config.fields, "rms_norm_eps": epsilon, "rope_parameters": ropes})
    layers = _layers(config, max_length)
    spec = with_head_norms(llama_like(config, max_length, [LayerSpec(None, None)] * len(layers)))
    attention = replace(spec.attention, gated=config.flag("use_attention_gate", True))
    gate = WeightSource(LAYER + "self_attn.gate_proj", repeats=attention.head_dim)
    spec = with_stems(replace(spec, attention=attention, norm_after=config.flag("use_sandwich_norm", True)), STEMS)
    spec = replace(spec, sources=MappingProxyType({**spec.sources, Part.ATTENTION_GATE: gate}))
    return lfm2.with_filters(spec, config, layers)


def _layers(config: ConfigFile, max_length: int | None) -> list[LayerSpec]:
    """Return the layers by `layer_types`, or else a period of four: window, convolution, full attention, convolution.

    The first layer is a convolution.
    """
    count = num_layers(config)
    usual = [CONVOLUTION, *((CONVOLUTION, FULL, CONVOLUTION, SLIDING)[index % 4] for index in range(count - 1))]
    kinds = config.texts("layer_types") if config.is_set("layer_types") else usual
    if len(kinds) != count or not {FULL, SLIDING, CONVOLUTION}.issuperset(kinds):
        raise config.error("layer_types", f"{count} of {FULL}, {SLIDING}, {CONVOLUTION}")
    bases = {"base": FULL_BASE, "sliding_base": LOCAL_BASE}
    full, near = full_and_sliding_ropes(config, head_dim(config), max_length, **bases)
    window = config.size("sliding_window", high=MAX_LENGTH) if SLIDING in kinds else None
    layers = {FULL: LayerSpec(None, full), SLIDING: LayerSpec(window, near), CONVOLUTION: CONVOLUTION_LAYER}
    return [layers[kind] for kind in kinds]
