"""Jina Embeddings v3: BERT with rotary positions, and other names for its tensors.

Its makers train adapters of the weights for tasks, such as questions or documents of a search. They are not part of the
model: without one, its vectors are those for no task.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.bert import bert_like
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import Part, WeightSource
from quire.compute.models.rope import rope_spec

PREFIX: Final = "roberta."
LAYER: Final = PREFIX + "encoder.layers.{layer}."
QKV: Final = LAYER + "mixer.Wqkv"
BASE: Final = 20_000.0
DEFAULTS: Final = MappingProxyType({"layer_norm_eps": 1e-5, "max_position_embeddings": 8194, "type_vocab_size": 1})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Jina Embeddings v3 model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    # Without a table of positions, whatever an older config.json says about them.
    spec = bert_like(ConfigFile(config.where, {**config.fields, "position_embedding_type": None}), PREFIX, 0)
    head_dim = spec.attention.head_dim
    if config.size("head_dim", head_dim) != head_dim:
        raise config.error("head_dim", f"{head_dim}, the hidden size divided by the number of heads")
    rope = rope_spec(config, head_dim, max_length, default_base=BASE)
    return replace(
        spec,
        layers=(LayerSpec(window=None, rope=rope),) * len(spec.layers),
        sources=_sources(spec.hidden_size),
        learned_positions=None,
    )


def _sources(hidden: int) -> MappingProxyType[Part, WeightSource]:
    return MappingProxyType(
        {
            Part.EMBEDDING: WeightSource(PREFIX + "embeddings.word_embeddings"),
            Part.TOKEN_TYPES: WeightSource(PREFIX + "embeddings.token_type_embeddings"),
            Part.EMBEDDING_NORM: WeightSource(PREFIX + "emb_ln"),
            Part.QUERY: WeightSource(QKV),
            Part.KEY: WeightSource(QKV, first_row=hidden),
            Part.VALUE: WeightSource(QKV, first_row=2 * hidden),
            Part.OUTPUT: WeightSource(LAYER + "mixer.out_proj"),
            Part.JOINED_ATTENTION_NORM: WeightSource(LAYER + "norm1"),
            Part.UP: WeightSource(LAYER + "mlp.fc1"),
            Part.DOWN: WeightSource(LAYER + "mlp.fc2"),
            Part.JOINED_MLP_NORM: WeightSource(LAYER + "norm2"),
        }
    )
