"""LLaVA-NeXT (1.6): the text model of LLaVA 1.5, next to an encoder of images that are cut into tiles.

The encoder is in vision/llava_next.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from quire.compute.models import llava
from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile

NEWLINE: Final = "image_newline"


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of the text model; refuses settings that quire does not interpret."""
    spec = llava.decoder_spec(config, max_length)
    return replace(spec, ignored_prefixes=(*spec.ignored_prefixes, NEWLINE))
