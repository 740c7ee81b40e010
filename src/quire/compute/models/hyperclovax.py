"""HyperCLOVA X SEED Think: Granite with norms on both sides of each sublayer, and a factor that multiplies logits."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models import granite
from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import LAYER, head_dim, with_stems
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import Part

AFTER: Final = MappingProxyType(
    {Part.AFTER_ATTENTION_NORM: LAYER + "post_norm1", Part.AFTER_MLP_NORM: LAYER + "post_norm2"}
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a HyperCLOVA X model; refuses settings that quire does not interpret."""
    spec = granite.decoder_spec(config, max_length)
    if config.flag("use_post_norm", True):
        spec = replace(with_stems(spec, AFTER), norm_after=True)
    scale = config.number("attention_multiplier", head_dim(config) ** -0.5)
    return replace(
        spec,
        attention=replace(spec.attention, scale=scale),
        logit_scale=config.number("logits_scaling", 1.0),
    )
