"""MPNet: BERT without token types, whose scores have biases by the distance of two tokens, the same in each layer.

Its first position is the third row of their table, because the padding token has the second one.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.bert import bert_like
from quire.compute.models.common import stem_sources
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.distances import NUM_BUCKETS
from quire.compute.models.parts import Part

PREFIX: Final = "mpnet."
LAYER: Final = PREFIX + "encoder.layer.{layer}."
FIRST_POSITION: Final = 2
STEMS: Final = MappingProxyType(
    {
        Part.DISTANCE_BIAS: PREFIX + "encoder.relative_attention_bias",
        Part.QUERY: LAYER + "attention.attn.q",
        Part.KEY: LAYER + "attention.attn.k",
        Part.VALUE: LAYER + "attention.attn.v",
        Part.OUTPUT: LAYER + "attention.attn.o",
        Part.JOINED_ATTENTION_NORM: LAYER + "attention.LayerNorm",
    }
)
"""The names that differ from BERT's."""


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of an MPNet model; refuses settings that quire does not interpret."""
    if config.size("relative_attention_num_buckets", NUM_BUCKETS) != NUM_BUCKETS:
        raise config.error("relative_attention_num_buckets", f"{NUM_BUCKETS}")
    spec = bert_like(config, PREFIX, FIRST_POSITION)
    sources = {**spec.sources, **stem_sources(STEMS)}
    del sources[Part.TOKEN_TYPES]
    return replace(
        spec,
        attention=replace(spec.attention, distance_bias=True),
        sources=MappingProxyType(sources),
        token_types=0,
    )
