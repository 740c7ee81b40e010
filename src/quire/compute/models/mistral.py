"""Mistral: Llama with one sliding window for all layers.

Mistral 7B v0.1 has a window of 4096 tokens, which is also the default if a config lacks the setting. From v0.2
on the window is null, and every layer has full attention.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, optional_window, rotary_layers, same_windows
from quire.compute.models.config_file import ConfigFile

DEFAULTS: Final = MappingProxyType({"num_key_value_heads": 8, "sliding_window": 4096})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Mistral model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    windows = same_windows(config, optional_window(config))
    return llama_like(config, max_length, rotary_layers(config, max_length, windows))
