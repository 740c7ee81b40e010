"""EuroBERT: Llama whose tokens attend to later tokens too, so that a text becomes a vector."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models import llama
from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile

HEADS: Final = ("classifier.", "dense.", "lm_head.")
"""What follows the last layer in checkpoints for other uses."""

DEFAULTS: Final = MappingProxyType({"max_position_embeddings": 8192, "rms_norm_eps": 1e-5})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a EuroBERT model; refuses settings that quire does not interpret."""
    spec = llama.decoder_spec(config.over(DEFAULTS), max_length)
    attention = replace(spec.attention, bidirectional=True)
    return replace(spec, attention=attention, tied_head=True, ignored_prefixes=HEADS)
