"""Falcon: layer norms, a plain MLP with exact GELU, few key-value heads, and sublayers that mostly read the same rows.

    7B                        one norm for both sublayers, one key-value head after all queries in one tensor
    40B, 180B                 `new_decoder_architecture`: two norms, each key-value head after the queries that read it
    11B                       the same with one norm (`num_ln_in_parallel_attn`)
    without `parallel_attn`   one sublayer after the other

Positions by ALiBi (Falcon-RW) are refused.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import (
    HEAD_TENSOR,
    activation,
    llama_like,
    rotary_layers,
    stem_sources,
    with_runs,
    with_stems,
)
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormSpec, Part
from quire.compute.models.sublayers import MLPSpec

LAYER: Final = "transformer.h.{layer}."
QKV: Final = LAYER + "self_attention.query_key_value"
STEMS: Final = MappingProxyType(
    {
        Part.EMBEDDING: "transformer.word_embeddings",
        Part.ATTENTION_NORM: LAYER + "input_layernorm",
        Part.OUTPUT: LAYER + "self_attention.dense",
        Part.MLP_NORM: LAYER + "post_attention_layernorm",
        Part.UP: LAYER + "mlp.dense_h_to_4h",
        Part.DOWN: LAYER + "mlp.dense_4h_to_h",
        Part.FINAL_NORM: "transformer.ln_f",
        Part.HEAD: "lm_head",
    }
)
TWO_NORMS: Final = MappingProxyType({Part.ATTENTION_NORM: LAYER + "ln_attn", Part.MLP_NORM: LAYER + "ln_mlp"})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Falcon model; refuses settings that quire does not interpret."""
    if config.flag("alibi", False):
        raise config.error("alibi", "false, because quire has no positions by ALiBi")
    config.refuse("apply_residual_connection_post_layernorm")
    config = _named_as_usual(config)
    spec = llama_like(config, max_length, rotary_layers(config, max_length))
    bias = config.flag("bias", False)
    spec = replace(
        spec,
        norm=NormSpec(NormKind.LAYER, config.number("layer_norm_epsilon", 1e-5)),
        attention=replace(spec.attention, bias=bias, output_bias=bias),
        mlp=MLPSpec(spec.mlp.intermediate_size, activation(config, "activation", "gelu"), gated=False, bias=bias),
        sources=stem_sources(STEMS),
        ignored_tensors=frozenset({HEAD_TENSOR} if spec.tied_head else set()),
    )
    return with_runs(_with_norms(spec, config), QKV)


def _named_as_usual(config: ConfigFile) -> ConfigFile:
    """Return the settings with Falcon's own names replaced by the usual ones."""
    heads, is_new = config.size("num_attention_heads"), config.flag("new_decoder_architecture", False)
    shared = config.flag("multi_query", True) and not is_new
    kv_heads = 1 if shared else config.size("num_kv_heads", heads) if is_new else heads
    usual = {
        "num_key_value_heads": kv_heads,
        "intermediate_size": config.size("ffn_hidden_size", 4 * config.size("hidden_size")),
    }
    defaults = {"tie_word_embeddings": True, "max_position_embeddings": 2048}
    return ConfigFile(config.where, {**defaults, **config.fields, **usual})


def _with_norms(spec: DecoderSpec, config: ConfigFile) -> DecoderSpec:
    """Return the spec with the norms of its variant."""
    is_new = config.flag("new_decoder_architecture", False)
    if not config.flag("parallel_attn", True):
        if is_new:
            raise config.error("parallel_attn", "true with new_decoder_architecture")
        return spec
    num_norms = config.size("num_ln_in_parallel_attn", 2, high=2) if is_new else 1
    spec = replace(spec, parallel=True, shared_norm=num_norms == 1)
    return with_stems(spec, TWO_NORMS) if num_norms == 2 else spec
