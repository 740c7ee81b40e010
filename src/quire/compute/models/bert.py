"""BERT: an encoder, with norms on the residual stream, biases everywhere and learned positions.

    token + token type + position ─► norm ─► layers ─► a hidden state for each token

A token attends to all tokens of its text. Each text is of the first token type. The model has no head: its hidden
states become vectors (`quire.core.pooling`). The pooler, a layer on the state of the first token, is not part of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import activation, divided_head_dim, num_layers, stem_sources
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormSpec, Part
from quire.compute.models.sublayers import AttentionSpec, MLPSpec

PREFIX: Final = "bert."
HEADS: Final = ("classifier.", "cls.", "lm_head.", "pooler.")
"""What follows the last layer in checkpoints for other uses."""


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a BERT model; refuses settings that quire does not interpret."""
    return bert_like(config, PREFIX, 0)


def bert_like(config: ConfigFile, prefix: str, first_position: int) -> DecoderSpec:
    """Return the spec of BERT; its tensors have this prefix, and its first position is that row of their table."""
    config.refuse("is_decoder", "add_cross_attention")
    config.require("position_embedding_type", "absolute", None)
    heads, head_dim = config.size("num_attention_heads"), divided_head_dim(config, "hidden_size", "num_attention_heads")
    rows = config.size("max_position_embeddings", 512)
    if rows <= first_position:
        raise config.error("max_position_embeddings", f"more than the {first_position} rows without a position")
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        context_length=rows - first_position,
        norm=NormSpec(NormKind.LAYER, config.number("layer_norm_eps", 1e-12)),
        attention=AttentionSpec(
            heads, heads, head_dim, head_dim**-0.5, bias=True, output_bias=True, bidirectional=True
        ),
        mlp=MLPSpec(config.size("intermediate_size"), activation(config, "hidden_act", "gelu"), gated=False, bias=True),
        layers=(LayerSpec(window=None, rope=None),) * num_layers(config),
        sources=stem_sources(_stems(prefix)),
        ignored_tensors=frozenset({prefix + "embeddings.position_ids"}),
        ignored_prefixes=(*HEADS, prefix + "pooler."),
        optional_prefix=prefix,
        tied_head=True,
        norm_before=False,
        norm_joined=True,
        final_norm=False,
        learned_positions=first_position,
        token_types=config.size("type_vocab_size", 2),
        embedding_norm=True,
    )


def _stems(prefix: str) -> Mapping[Part, str]:
    layer = prefix + "encoder.layer.{layer}."
    return MappingProxyType(
        {
            Part.EMBEDDING: prefix + "embeddings.word_embeddings",
            Part.POSITIONS: prefix + "embeddings.position_embeddings",
            Part.TOKEN_TYPES: prefix + "embeddings.token_type_embeddings",
            Part.EMBEDDING_NORM: prefix + "embeddings.LayerNorm",
            Part.QUERY: layer + "attention.self.query",
            Part.KEY: layer + "attention.self.key",
            Part.VALUE: layer + "attention.self.value",
            Part.OUTPUT: layer + "attention.output.dense",
            Part.JOINED_ATTENTION_NORM: layer + "attention.output.LayerNorm",
            Part.UP: layer + "intermediate.dense",
            Part.DOWN: layer + "output.dense",
            Part.JOINED_MLP_NORM: layer + "output.LayerNorm",
        }
    )
