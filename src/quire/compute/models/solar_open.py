"""Solar Open: GLM-4.5 with experts in every layer, whose heads rotate entirely."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models import glm4_moe
from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile

DEFAULTS: Final = MappingProxyType(
    {
        **{"head_dim": 128, "moe_intermediate_size": 1280, "partial_rotary_factor": 1.0, "rope_theta": 1_000_000.0},
        "first_k_dense_replace": 0,
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Solar Open model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    config.refuse("use_qk_norm")
    if config.size("first_k_dense_replace", low=0):
        raise config.error("first_k_dense_replace", "0: experts in every layer")
    # No layer has an MLP of this size, which folders of transformers leave out.
    return glm4_moe.decoder_spec(config.over({"intermediate_size": 1}), max_length)
