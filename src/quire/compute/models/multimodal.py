"""The text model of a multimodal model: its settings, its tensors next to those for images, positions with axes.

The weights for images are ignored by the beginning of their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import PREFIX
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import Part, WeightSource
from quire.compute.models.rope import SECTIONS
from quire.compute.models.sublayers import MAX_AXES

MROPE_SECTION: Final = "mrope_section"
TIED: Final = "tie_word_embeddings"


def text_config(config: ConfigFile) -> ConfigFile:
    """Return the settings of the text model; it has a tied head only if neither config says otherwise.

    Two configs may disagree, because some versions of transformers write a default. Then the file must have a head.
    """
    text = config.section("text_config")
    tied = text.flag(TIED, config.flag(TIED, False)) and config.flag(TIED, True)
    return ConfigFile(text.where, {**text.fields, TIED: tied})


def below(text: str) -> Callable[[str], str]:
    """Return the function to the names of a text model's tensors in a file where they begin with `text`."""
    return lambda name: text + name.removeprefix(PREFIX) if name.startswith(PREFIX) else name


def with_other_tensors(spec: DecoderSpec, rename: Callable[[str], str], prefixes: tuple[str, ...]) -> DecoderSpec:
    """Return the spec of a checkpoint that has other names, and tensors with these prefixes for images."""

    def renamed(sources: Mapping[Part, WeightSource]) -> Mapping[Part, WeightSource]:
        stems = {part: rename(source.stem) for part, source in sources.items() if source.stem}
        return MappingProxyType({part: replace(each, stem=stems.get(part, "")) for part, each in sources.items()})

    return replace(
        spec,
        sources=renamed(spec.sources),
        guess_sources=renamed(spec.guess_sources),
        ignored_tensors=frozenset(map(rename, spec.ignored_tensors)),
        ignored_prefixes=prefixes,
    )


def with_axes(config: ConfigFile, spec: DecoderSpec, *, in_turns: bool) -> DecoderSpec:
    """Return the spec whose pairs rotate by time, height and width, if the settings have sections for them.

    The sections are one after another, or `in_turns`: pairs take turns, and those left over rotate by time.
    """
    section = next((each for each in map(config.section, SECTIONS) if each.is_set(MROPE_SECTION)), None)
    if section is None:
        return spec
    num_pairs = next(layer.rope.rotary_dim // 2 for layer in spec.layers if layer.rope is not None)
    counts = section.fields[MROPE_SECTION]
    is_list = isinstance(counts, list) and all(type(count) is int and 0 <= count <= num_pairs for count in counts)
    if not isinstance(counts, list) or not is_list or len(counts) != MAX_AXES or sum(counts) != num_pairs:
        raise section.error(MROPE_SECTION, f"{MAX_AXES} integers with the sum {num_pairs}")
    if in_turns:
        turns = ((pair, pair % MAX_AXES) for pair in range(num_pairs))
        axes = tuple(axis if pair < counts[axis] * MAX_AXES else 0 for pair, axis in turns)
    else:
        axes = tuple(axis for axis, count in enumerate(counts) for _ in range(count))
    return replace(spec, layers=tuple(_turned(layer, axes) for layer in spec.layers))


def _turned(layer: LayerSpec, axes: tuple[int, ...]) -> LayerSpec:
    return layer if layer.rope is None else replace(layer, rope=replace(layer.rope, axes=axes))
