"""Granite-MoE with windows (Swash): the windows, sinks and bases of Granite with windows, and experts in each layer."""

from __future__ import annotations

from quire.compute.models import granite_moe, granite_swa
from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import LAYER, with_stems
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import Part


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Granite-MoE model with windows; refuses settings that quire does not interpret."""
    config = config.over({"sliding_window": granite_swa.WINDOW})
    spec = granite_swa.with_windows(granite_moe.decoder_spec(config, max_length), config, max_length)
    return with_stems(spec, {Part.ROUTER: LAYER + "block_sparse_moe.router"})
