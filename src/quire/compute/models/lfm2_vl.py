"""LFM2-VL: the text model of LFM2, next to an encoder of images.

The encoder is in vision/lfm2_vl.py.
"""

from __future__ import annotations

from typing import Final

from quire.compute.models import lfm2
from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.multimodal import TIED, below, with_other_tensors

TEXT: Final = "model.language_model."
IMAGES: Final = ("model.multi_modal_projector.", "model.vision_tower.")
OLDER_TIED: Final = "tie_embedding"


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of the text model; refuses settings that quire does not interpret."""
    text = config.section("text_config")
    text.require("model_type", "lfm2", None)
    tied = config.flag(OLDER_TIED, config.flag(TIED, True)) and text.flag(OLDER_TIED, text.flag(TIED, True))
    spec = lfm2.decoder_spec(ConfigFile(text.where, {**text.fields, OLDER_TIED: tied}), max_length)
    return with_other_tensors(spec, below(TEXT), IMAGES)
