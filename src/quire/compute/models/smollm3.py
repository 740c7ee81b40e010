"""SmolLM3: Llama in which every fourth layer has no rotary positions.

`no_rope_layers` has, in spite of its name, a 1 for each layer with rotary positions. Without the list, every
`no_rope_layer_interval`-th layer lacks them. By default, only layers without rotary positions have a window.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, mixed_windows, num_layers, rotary_layers
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.qwen2 import used_window

DEFAULTS: Final = MappingProxyType({"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2_000_000.0})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a SmolLM3 model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    turns = _turning_layers(config, num_layers(config))
    windows = mixed_windows(config, used_window(config), lambda layer: not turns[layer])
    layers = rotary_layers(config, max_length, windows)
    layers = tuple(layer if has else replace(layer, rope=None) for layer, has in zip(layers, turns, strict=True))
    spec = llama_like(config, max_length, layers)
    return replace(spec, mlp=replace(spec.mlp, bias=config.flag("mlp_bias", False)))


def _turning_layers(config: ConfigFile, count: int) -> list[bool]:
    """Return for each layer whether it has rotary positions."""
    if not config.is_set("no_rope_layers"):
        interval = config.size("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(count)]
    listed = config.fields["no_rope_layers"]
    if not isinstance(listed, list) or len(listed) < count or not all(item in (0, 1) for item in listed):
        raise config.error("no_rope_layers", f"a list of 0 and 1 for {count} layers")
    return [bool(item) for item in listed[:count]]
