"""CWM: Llama with a window in three of four layers, whose positions are scaled as in Llama 3."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, mixed_windows, optional_window, rotary_layers
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.rope import SECTIONS

BASE: Final = 1_000_000.0
SCALING: Final = MappingProxyType(
    {
        **{"rope_type": "llama3", "rope_theta": BASE, "factor": 16.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    }
)
DEFAULTS: Final = MappingProxyType(
    {
        **{"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": BASE},
        "sliding_window": 8192,
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a CWM model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    config.refuse("attention_bias", "mlp_bias")
    if not any(config.is_set(section) for section in SECTIONS):
        config = ConfigFile(config.where, {**config.fields, "rope_parameters": dict(SCALING)})
    windows = mixed_windows(config, optional_window(config), lambda layer: layer % 4 != 0)
    return llama_like(config, max_length, rotary_layers(config, max_length, windows))
