"""Gemma 4 12B: Gemma 4 without inputs of layers and experts, in a model that reads images without a tower of layers."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models import gemma4
from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile

DEFAULTS: Final = MappingProxyType(
    {
        **gemma4.DEFAULTS,
        **{"hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262_144},
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of such a model, or of its text model; refuses settings that quire does not interpret."""
    return gemma4.gemma4_like(config, DEFAULTS, max_length)
