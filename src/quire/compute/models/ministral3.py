"""Ministral 3: Mistral with positions scaled by yarn, whose queries grow with their position.

The queries of the first `original_max_position_embeddings` positions are as in Mistral.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, optional_window, rotary_layers, same_windows
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.rope import SECTIONS

DEFAULTS: Final = MappingProxyType({"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5})
YARN: Final = MappingProxyType(
    {
        **{"rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0},
        **{"original_max_position_embeddings": 16_384, "mscale": 1.0, "mscale_all_dim": 1.0},
        "llama_4_scaling_beta": 0.1,
    }
)
"""The scaling of a model whose settings have none."""


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Ministral 3 model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    if not any(map(config.is_set, SECTIONS)):
        config = ConfigFile(config.where, {**config.fields, "rope_parameters": dict(YARN)})
    windows = same_windows(config, optional_window(config))
    return llama_like(config, max_length, rotary_layers(config, max_length, windows, grows=True))
