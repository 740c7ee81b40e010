"""EXAONE 4: norms after each sublayer, as in OLMo 2, and on heads; in large models, most layers have a window.

Layers without a window have no positions if others have one. transformers has the number of layers from one without a
window to the next as `sliding_window_pattern`; the first models have a text such as LLLG (local, global) instead.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models import olmo2
from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import (
    llama_like,
    mixed_windows,
    num_layers,
    optional_window,
    rotary_layers,
    with_head_norms,
    with_stems,
)
from quire.compute.models.config_file import ConfigFile

DEFAULTS: Final = MappingProxyType(
    {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4}
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of an EXAONE 4 model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    layers = windowed_layers(config, max_length)
    spec = with_head_norms(with_stems(llama_like(config, max_length, layers), olmo2.STEMS))
    return replace(spec, norm_before=False, norm_after=True)


def windowed_layers(config: ConfigFile, max_length: int | None) -> tuple[LayerSpec, ...]:
    """Return layers with windows; if some have one, the others have no positions."""
    window = optional_window(config)
    is_listed = window is None or config.is_set("layer_types")
    is_local = [False] * num_layers(config) if is_listed else _local_layers(config)
    layers = rotary_layers(config, max_length, mixed_windows(config, window, is_local.__getitem__))
    if window is None:
        return layers
    return tuple(layer if layer.window else replace(layer, rope=None) for layer in layers)


def _local_layers(config: ConfigFile) -> list[bool]:
    """Return for each layer whether it has a window, by `sliding_window_pattern`."""
    count, pattern = num_layers(config), config.fields["sliding_window_pattern"]
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        found = [pattern[layer % len(pattern)] == "L" for layer in range(count)]
        if found[-1]:  # transformers calls the last layer global, llama.cpp follows the pattern
            raise config.error("sliding_window_pattern", f"one that gives the last of {count} layers a G")
        return found
    if not isinstance(pattern, int):
        raise config.error("sliding_window_pattern", "a number of layers, or a text of L and G")
    interval = config.size("sliding_window_pattern")
    return [(layer + 1) % interval != 0 for layer in range(count)]
