"""InternVL 3 and 3.5: the text model of Qwen2, Qwen3 or another family, next to an encoder of images.

The encoder is in vision/internvl.py.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models import gpt_oss, llama, qwen2, qwen3, qwen3_moe
from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.multimodal import TIED, text_config, with_other_tensors

TEXT: Final = "language_model."
IMAGES: Final = ("multi_modal_projector.", "vision_tower.")
MODELS: Final = MappingProxyType(
    {
        **{"gpt_oss": gpt_oss.decoder_spec, "llama": llama.decoder_spec, "qwen2": qwen2.decoder_spec},
        **{"qwen3": qwen3.decoder_spec, "qwen3_moe": qwen3_moe.decoder_spec},
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of the text model; refuses settings that quire does not interpret."""
    text = text_config(config.over({TIED: True}))
    text.require("model_type", *MODELS, None)
    spec = MODELS[str(text.fields.get("model_type") or "qwen2")](text, max_length)
    return with_other_tensors(spec, TEXT.__add__, IMAGES)
