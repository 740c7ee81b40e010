"""Command R7B and Command A (Cohere 2): Command R with a window in three of four layers; the others lack positions."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.cohere import DEFAULTS as COHERE_DEFAULTS
from quire.compute.models.cohere import cohere_like
from quire.compute.models.common import head_dim, mixed_windows
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.compute.models.rope import rope_spec

DEFAULTS: Final = MappingProxyType({**COHERE_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Cohere 2 model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    config.refuse("use_qk_norm")
    window, pattern = config.size("sliding_window", high=MAX_LENGTH), config.size("sliding_window_pattern")
    windows = mixed_windows(config, window, lambda layer: (layer + 1) % pattern != 0)
    rope = rope_spec(config, head_dim(config), max_length)
    layers = [LayerSpec(each, None if each is None else rope) for each in windows]
    if all(each is None for each in windows):
        raise config.error("layer_types", "a sliding layer, because only those have positions")
    return cohere_like(config, max_length, layers)
