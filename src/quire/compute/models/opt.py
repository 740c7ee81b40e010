"""OPT: layer norms, biases, learned positions from the third row of their table on, a plain MLP.

OPT-350m is special: its norms are on the residual stream, and its small embeddings are projected in and out.
Norms without weights (`layer_norm_elementwise_affine` false) are refused.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import HEAD_TENSOR, activation, divided_head_dim, num_layers, stem_sources
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormSpec, Part
from quire.compute.models.sublayers import AttentionSpec, MLPSpec

PREFIX: Final = "model."
DECODER: Final = PREFIX + "decoder."
LAYER: Final = DECODER + "layers.{layer}."
NORM_EPSILON: Final = 1e-5
STEMS: Final = MappingProxyType(
    {
        Part.EMBEDDING: DECODER + "embed_tokens",
        Part.EMBEDDING_IN: DECODER + "project_in",
        Part.EMBEDDING_OUT: DECODER + "project_out",
        Part.POSITIONS: DECODER + "embed_positions",
        Part.QUERY: LAYER + "self_attn.q_proj",
        Part.KEY: LAYER + "self_attn.k_proj",
        Part.VALUE: LAYER + "self_attn.v_proj",
        Part.OUTPUT: LAYER + "self_attn.out_proj",
        Part.ATTENTION_NORM: LAYER + "self_attn_layer_norm",
        Part.JOINED_ATTENTION_NORM: LAYER + "self_attn_layer_norm",
        Part.UP: LAYER + "fc1",
        Part.DOWN: LAYER + "fc2",
        Part.MLP_NORM: LAYER + "final_layer_norm",
        Part.JOINED_MLP_NORM: LAYER + "final_layer_norm",
        Part.FINAL_NORM: DECODER + "final_layer_norm",
        Part.HEAD: "lm_head",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of an OPT model; refuses settings that quire does not interpret."""
    if not config.flag("layer_norm_elementwise_affine", True):
        raise config.error("layer_norm_elementwise_affine", "true")
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    head_dim = divided_head_dim(config, "hidden_size", "num_attention_heads")
    bias, before = config.flag("enable_bias", True), config.flag("do_layer_norm_before", True)
    row, tied = config.size("word_embed_proj_dim", hidden), config.flag("tie_word_embeddings", True)
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        context_length=config.size("max_position_embeddings", 2048),
        norm=NormSpec(NormKind.LAYER, NORM_EPSILON),
        attention=AttentionSpec(heads, heads, head_dim, head_dim**-0.5, bias=bias, output_bias=bias),
        mlp=MLPSpec(config.size("ffn_dim"), activation(config, "activation_function", "relu"), gated=False, bias=bias),
        layers=(LayerSpec(window=None, rope=None),) * num_layers(config),
        sources=stem_sources(STEMS),
        ignored_tensors=frozenset({HEAD_TENSOR}) if tied else frozenset(),
        optional_prefix=PREFIX,
        tied_head=tied,
        norm_before=before,
        norm_joined=not before,
        final_norm=before and not config.flag("_remove_final_layer_norm", False),
        embedding_size=None if row == hidden else row,
        learned_positions=2,
    )
