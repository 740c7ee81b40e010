"""OLMo 3: OLMo 2 with a window in three of four layers; only the other layers have scaled positions."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import head_dim, mixed_windows
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.compute.models.olmo2 import DEFAULTS as OLMO2_DEFAULTS
from quire.compute.models.olmo2 import olmo_like
from quire.compute.models.rope import full_and_sliding_ropes

DEFAULTS: Final = MappingProxyType({**OLMO2_DEFAULTS, "sliding_window": 4096})
BASE: Final = 500_000.0


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of an OLMo 3 model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    window = config.size("sliding_window", high=MAX_LENGTH)
    windows = mixed_windows(config, window, lambda layer: (layer + 1) % 4 != 0)
    base = config.number("rope_theta", BASE)
    full, local = full_and_sliding_ropes(config, head_dim(config), max_length, base=BASE, sliding_base=base)
    layers = [LayerSpec(each, full if each is None else local) for each in windows]
    return olmo_like(config, max_length, layers)
