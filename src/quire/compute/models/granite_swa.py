"""Granite with windows (Swash): a window in three of four layers, a sink in each softmax, and a base for each layer.

`layer_rope_theta` has the base of each layer's positions, 0 for a layer without positions.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models import granite
from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import LAYER, head_dim, mixed_windows, optional_window, with_stems
from quire.compute.models.config_file import MAX_NUMBER, ConfigFile
from quire.compute.models.parts import Part
from quire.compute.models.rope import SECTIONS, rope_spec
from quire.compute.models.sublayers import RopeSpec

BASES: Final = "layer_rope_theta"
WINDOW: Final = 128
DEFAULTS: Final = MappingProxyType(
    {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "sliding_window": WINDOW, "tie_word_embeddings": True}
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Granite model with windows; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    return with_windows(granite.decoder_spec(config, max_length), config, max_length)


def with_windows(spec: DecoderSpec, config: ConfigFile, max_length: int | None) -> DecoderSpec:
    """Return the spec of a Granite with the window and the base of each layer, and with sinks."""
    spec = with_stems(spec, {Part.SINKS: LAYER + "self_attn.sinks"})
    windows = mixed_windows(config, optional_window(config), lambda layer: layer % 4 != 0)
    of_layers = zip(spec.layers, windows, _ropes(config, spec.layers, max_length), strict=True)
    layers = tuple(replace(layer, window=window, rope=rope) for layer, window, rope in of_layers)
    return replace(spec, layers=layers, attention=replace(spec.attention, sinks=True))


def _ropes(config: ConfigFile, layers: tuple[LayerSpec, ...], max_length: int | None) -> list[RopeSpec | None]:
    """Return the positions of each layer, those of the model without `layer_rope_theta`."""
    if not config.is_set(BASES):
        return [layer.rope for layer in layers]
    bases = config.fields[BASES]
    if not isinstance(bases, list) or len(bases) != len(layers):
        raise config.error(BASES, f"a list of {len(layers)} numbers from 0")
    if not all(type(base) in (int, float) and 0 <= base <= MAX_NUMBER for base in bases):
        raise config.error(BASES, f"a list of {len(layers)} numbers from 0")
    found = {base: _rope(config, base, max_length) if base else None for base in set(bases)}
    return [found[base] for base in bases]


def _rope(config: ConfigFile, base: float, max_length: int | None) -> RopeSpec:
    sections = {name: config.section(name).fields for name in SECTIONS if config.is_set(name)}
    changed = {name: {**fields, "rope_theta": base} for name, fields in sections.items()}
    return rope_spec(
        ConfigFile(config.where, {**config.fields, **changed, "rope_theta": base}), head_dim(config), max_length
    )
