"""DistilBERT: BERT without token types, with other names for its settings and tensors."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.bert import bert_like
from quire.compute.models.common import stem_sources
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import Part

PREFIX: Final = "distilbert."
LAYER: Final = PREFIX + "transformer.layer.{layer}."
HEADS: Final = ("vocab_layer_norm.", "vocab_projector.", "vocab_transform.", "pre_classifier.", "classifier.")
"""What follows the last layer in checkpoints for other uses."""

NAMES: Final = MappingProxyType(
    {
        "activation": "hidden_act",
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
    }
)
"""Settings → their names in BERT's, which GGUF files have."""

STEMS: Final = MappingProxyType(
    {
        Part.EMBEDDING: PREFIX + "embeddings.word_embeddings",
        Part.POSITIONS: PREFIX + "embeddings.position_embeddings",
        Part.EMBEDDING_NORM: PREFIX + "embeddings.LayerNorm",
        Part.QUERY: LAYER + "attention.q_lin",
        Part.KEY: LAYER + "attention.k_lin",
        Part.VALUE: LAYER + "attention.v_lin",
        Part.OUTPUT: LAYER + "attention.out_lin",
        Part.JOINED_ATTENTION_NORM: LAYER + "sa_layer_norm",
        Part.UP: LAYER + "ffn.lin1",
        Part.DOWN: LAYER + "ffn.lin2",
        Part.JOINED_MLP_NORM: LAYER + "output_layer_norm",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a DistilBERT model. Sinusoidal positions are a table in the checkpoint, as learned ones."""
    named = {ours: config.fields[theirs] for theirs, ours in NAMES.items() if theirs in config.fields}
    fixed = {"layer_norm_eps": 1e-12, "position_embedding_type": None} if named else {}  # transformers reads neither
    spec = bert_like(ConfigFile(config.where, {**config.fields, **named, **fixed}), PREFIX, 0)
    return replace(spec, token_types=0, sources=stem_sources(STEMS), ignored_prefixes=HEADS)
