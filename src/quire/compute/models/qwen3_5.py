"""Qwen3.5: Qwen3-Next with an MLP in each layer, in most models next to an encoder of images.

Each product of a recurrent layer has its own tensor, except queries, keys and values. Positions have three parts, as in
Qwen3-VL. The encoder is in vision/qwen3_vl.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from quire.compute.models import qwen3_next
from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.multimodal import below, text_config, with_axes, with_other_tensors
from quire.compute.models.parts import Part, WeightSource
from quire.compute.models.qwen3_next import (
    DELTA,
    GUESSING,
    consecutive_rows,
    delta_rule,
    with_gated_attention,
    with_recurrent_layers,
)
from quire.compute.models.recurrent import DeltaSpec

DEFAULTS: Final = MappingProxyType({**qwen3_next.DEFAULTS, "num_key_value_heads": 4})
TEXT: Final = "model.language_model."
IMAGES: Final = ("model.visual.", *GUESSING)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a model, or of its text model; refuses settings that quire does not interpret."""
    return text_spec(config, DEFAULTS, lambda text: with_gated_attention(text, max_length))


def text_spec(
    config: ConfigFile, defaults: Mapping[str, object], read: Callable[[ConfigFile], DecoderSpec]
) -> DecoderSpec:
    """Return the spec of a model, or of its text model; `read` gives it without recurrent layers."""
    is_nested = config.is_set("text_config")
    text = (text_config(config) if is_nested else config).over(defaults)
    spec = read(text)
    delta = delta_rule(text, spec.norm)
    spec = with_recurrent_layers(spec, text, delta, _rows(delta))
    return with_other_tensors(with_axes(text, spec, in_turns=True), below(TEXT), IMAGES) if is_nested else spec


def _rows(delta: DeltaSpec) -> Mapping[Part, WeightSource]:
    return consecutive_rows(delta) | {
        Part.DELTA_RATE: WeightSource(DELTA + "in_proj_b"),
        Part.DELTA_DECAY: WeightSource(DELTA + "in_proj_a"),
    }
