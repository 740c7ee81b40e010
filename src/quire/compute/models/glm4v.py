"""GLM-4.1V, 4.5V and 4.6V: the text model of GLM-4 or GLM-4.5, next to an encoder of images.

As in Qwen2-VL, positions have three parts, which are one after another. Settings of the text model are in
`text_config`, but not in the first folders. The encoder is in vision/glm4v.py.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models import glm4, glm4_moe
from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.multimodal import below, text_config, with_axes, with_other_tensors

TEXT: Final = "model.language_model."
IMAGES: Final = ("model.visual.",)
MODELS: Final = MappingProxyType({"glm4v_text": glm4.decoder_spec, "glm4v_moe_text": glm4_moe.decoder_spec})
WITH_EXPERTS: Final = "Glm4vMoeForConditionalGeneration"
DEFAULTS: Final = MappingProxyType({"attention_bias": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of the text model; refuses settings that quire does not interpret."""
    kind = "glm4v_moe_text" if config.texts("architectures")[0] == WITH_EXPERTS else "glm4v_text"
    text = text_config(config) if config.is_set("text_config") else config
    text.require("model_type", kind, kind.removesuffix("_text"), None)
    text = text.over(DEFAULTS)
    own = ConfigFile(text.where, {**text.fields, "architectures": ["Glm4ForCausalLM"], "head_dim": None})
    spec = MODELS[kind](own if kind == "glm4v_text" else text, max_length)
    return with_other_tensors(with_axes(text, spec, in_turns=False), below(TEXT), IMAGES)
