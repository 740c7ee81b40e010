"""Qwen2 and Qwen2.5: Llama with biases on query, key and value, and windows in some layers.

These three always have biases, regardless of the settings, and the output has none. With `use_sliding_window`,
layers from `max_window_layers` on have a sliding window, unless `layer_types` specifies the layers.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, mixed_windows, optional_window, rotary_layers
from quire.compute.models.config_file import ConfigFile

DEFAULTS: Final = MappingProxyType({"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Qwen2 model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    config.refuse("use_mrope")
    spec = llama_like(config, max_length, rotary_layers(config, max_length, windows(config)))
    return replace(spec, attention=replace(spec.attention, bias=True, output_bias=False))


def windows(config: ConfigFile) -> list[int | None]:
    """Return the window of each layer, None for full attention."""
    first = config.size("max_window_layers", 28, low=0)
    return mixed_windows(config, used_window(config), lambda layer: layer >= first)


def used_window(config: ConfigFile) -> int | None:
    """Return the window if it is in use, else None."""
    return optional_window(config) if config.flag("use_sliding_window", False) else None
