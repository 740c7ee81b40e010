"""VaultGemma: Gemma 2 without norms after its sublayers."""

from __future__ import annotations

from dataclasses import replace

from quire.compute.models import gemma2
from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a VaultGemma model; refuses settings that quire does not interpret."""
    return replace(gemma2.decoder_spec(config, max_length), norm_after=False)
