"""Ministral 8B of 2024: Mistral with a window in every layer, or in those that a list names."""

from __future__ import annotations

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, mixed_windows, optional_window, rotary_layers
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.mistral import DEFAULTS


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Ministral model of 2024; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    config.refuse("attention_bias")
    windows = mixed_windows(config, optional_window(config), lambda layer: True)
    return llama_like(config, max_length, rotary_layers(config, max_length, windows))
