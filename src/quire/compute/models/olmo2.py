"""OLMo 2: norms after each sublayer instead of before, and one norm each over all queries and all keys of a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import LAYER, llama_like, rotary_layers, with_head_norms, with_stems
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormScope, Part

DEFAULTS: Final = MappingProxyType({"rms_norm_eps": 1e-5})
STEMS: Final = MappingProxyType(
    {
        Part.AFTER_ATTENTION_NORM: LAYER + "post_attention_layernorm",
        Part.AFTER_MLP_NORM: LAYER + "post_feedforward_layernorm",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of an OLMo 2 model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    return olmo_like(config, max_length, rotary_layers(config, max_length))


def olmo_like(config: ConfigFile, max_length: int | None, layers: Sequence[LayerSpec]) -> DecoderSpec:
    """Return the spec that OLMo 2 and 3 share."""
    spec = with_head_norms(with_stems(llama_like(config, max_length, layers), STEMS))
    attention = replace(spec.attention, qk_norm_scope=NormScope.ALL_HEADS)
    return replace(spec, attention=attention, norm_before=False, norm_after=True)
