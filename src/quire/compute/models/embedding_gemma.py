"""EmbeddingGemma: Gemma 3 whose tokens attend to later tokens too, so that a text becomes a vector.

`sliding_window` counts the tokens on both sides of a token together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from quire.compute.models import gemma3
from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile

AFTER: Final = ("2_Dense.", "3_Dense.")
"""The tensors of the layers after the pooling, if they are in one file with the others."""


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of an EmbeddingGemma model; refuses settings that quire does not interpret."""
    if not config.flag("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention", "true in a model without a head")
    window = config.over(gemma3.DEFAULTS).size("sliding_window", high=MAX_LENGTH) // 2 + 1
    one_way = {"use_bidirectional_attention": False, "sliding_window": window}
    spec = gemma3.decoder_spec(ConfigFile(config.where, {**config.fields, **one_way}), max_length)
    attention = replace(spec.attention, bidirectional=True)
    return replace(spec, attention=attention, tied_head=True, ignored_prefixes=(*spec.ignored_prefixes, *AFTER))
