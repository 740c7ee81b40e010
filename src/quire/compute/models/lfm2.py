"""LFM2: short convolutions in most layers, attention with norms on heads in the others.

The size of the MLP is two thirds of a setting, rounded up to a multiple of another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import LAYER, head_dim, llama_like, num_layers, with_stems
from quire.compute.models.config_file import MAX_SIZE, ConfigFile
from quire.compute.models.parts import Part, WeightSource
from quire.compute.models.recurrent import ConvolutionSpec
from quire.compute.models.rope import FULL, rope_spec

CONVOLUTION: Final = "conv"
BASE: Final = 1_000_000.0
MAX_FILTER: Final = 64
DEFAULTS: Final = MappingProxyType(
    {
        **{"vocab_size": 65_536, "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "max_position_embeddings": 128_000, "norm_eps": 1e-5},
        **{"conv_L_cache": 3, "rope_theta": BASE},
    }
)
FEED_FORWARD: Final = LAYER + "feed_forward."
CONV: Final = LAYER + "conv."
STEMS: Final = MappingProxyType(
    {
        Part.ATTENTION_NORM: LAYER + "operator_norm",
        Part.MLP_NORM: LAYER + "ffn_norm",
        **{Part.GATE: FEED_FORWARD + "w1", Part.UP: FEED_FORWARD + "w3", Part.DOWN: FEED_FORWARD + "w2"},
        **{Part.CONVOLUTION_FILTER: CONV + "conv", Part.CONVOLUTION_OUTPUT: CONV + "out_proj"},
        Part.FINAL_NORM: "model.embedding_norm",
    }
)
ATTENTION_STEMS: Final = MappingProxyType(
    {
        Part.OUTPUT: LAYER + "self_attn.out_proj",
        Part.QUERY_NORM: LAYER + "self_attn.q_layernorm",
        Part.KEY_NORM: LAYER + "self_attn.k_layernorm",
    }
)
CONVOLUTION_LAYER: Final = LayerSpec(None, None, recurrent=True)
IN_ORDER: Final = (Part.CONVOLUTION_GATE, Part.CONVOLUTION_OUTPUT_GATE, Part.CONVOLUTION_VALUE)
"""The parts of in_proj, one after another."""


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of an LFM2 model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    width = config.size("block_ff_dim", config.size("intermediate_size", 12_288))
    if config.flag("block_auto_adjust_ff_dim", True):
        width = _adjusted(config, width)
    return with_convolutions(ConfigFile(config.where, {**config.fields, "intermediate_size": width}), max_length)


def with_convolutions(config: ConfigFile, max_length: int | None) -> DecoderSpec:
    """Return the spec of a model with short convolutions, given the size of its MLP."""
    config.refuse("conv_bias")
    tied = config.flag("tie_embedding", config.flag("tie_word_embeddings", True))
    epsilon = config.number("norm_eps")
    config = ConfigFile(config.where, {**config.fields, "rms_norm_eps": epsilon, "tie_word_embeddings": tied})
    full = LayerSpec(None, rope_spec(config, head_dim(config), max_length, default_base=BASE))
    recurrent = _recurrent(config)
    spec = with_stems(llama_like(config, max_length, [full] * len(recurrent)), {**STEMS, **ATTENTION_STEMS})
    spec = replace(spec, attention=replace(spec.attention, qk_norm=spec.norm))
    return with_filters(spec, config, [CONVOLUTION_LAYER if each else full for each in recurrent])


def with_filters(spec: DecoderSpec, config: ConfigFile, layers: Sequence[LayerSpec]) -> DecoderSpec:
    """Return the spec with these layers, and with the settings and sources of convolutions if some layers are these."""
    if not any(layer.recurrent for layer in layers):
        return replace(spec, layers=tuple(layers))
    size = spec.hidden_size
    rows = {part: WeightSource(CONV + "in_proj", first_row=index * size) for index, part in enumerate(IN_ORDER)}
    convolution = ConvolutionSpec(size, config.size("conv_L_cache", high=MAX_FILTER))
    sources = MappingProxyType({**spec.sources, **rows})
    return replace(spec, layers=tuple(layers), convolution=convolution, sources=sources)


def _adjusted(config: ConfigFile, width: int) -> int:
    """Return the size of the MLP that transformers computes from the settings."""
    width = int(2 * width / 3)
    if config.is_set("block_ffn_dim_multiplier"):
        width = int(config.number("block_ffn_dim_multiplier") * width)
    multiple = config.size("block_multiple_of", 256)
    width = multiple * -(-width // multiple)
    if not 1 <= width <= MAX_SIZE:
        raise config.error("block_ffn_dim_multiplier", f"a factor that gives an MLP of 1 to {MAX_SIZE} numbers")
    return width


def _recurrent(config: ConfigFile) -> list[bool]:
    """Return whether each layer is a convolution: by `layer_types`, or else if it is not among `full_attn_idxs`."""
    count = num_layers(config)
    if not config.is_set("layer_types"):
        full = config.indices("full_attn_idxs", count) if config.is_set("full_attn_idxs") else frozenset(range(count))
        return [layer not in full for layer in range(count)]
    kinds = config.texts("layer_types")
    if len(kinds) != count or not {FULL, CONVOLUTION}.issuperset(kinds):
        raise config.error("layer_types", f"{count} of {FULL}, {CONVOLUTION}")
    return [kind == CONVOLUTION for kind in kinds]
