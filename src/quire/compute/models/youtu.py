"""Youtu: DeepSeek-V3's attention with one latent for all heads (MLA), and an MLP in each layer."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.deepseek import DEFAULTS as LATENTS
from quire.compute.models.deepseek import latent_like

DEFAULTS: Final = MappingProxyType({**LATENTS, "tie_word_embeddings": True})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Youtu model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    config.refuse("mlp_bias")
    return latent_like(config, max_length, has_pairs=config.flag("rope_interleave", True))
