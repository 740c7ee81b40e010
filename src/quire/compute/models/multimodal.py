"""The text model of a multimodal model: its settings, and its tensors next to those that quire does not use.

Only text is served. The weights for images are ignored by the beginning of their names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile

TIED: Final = "tie_word_embeddings"


def text_config(config: ConfigFile) -> ConfigFile:
    """Return the settings of the text model; it has a tied head only if neither config says otherwise.

    Two configs may disagree, because some versions of transformers write a default. Then the file must have a head.
    """
    text = config.section("text_config")
    tied = text.flag(TIED, config.flag(TIED, False)) and config.flag(TIED, True)
    return ConfigFile(text.where, {**text.fields, TIED: tied})


def with_other_tensors(spec: DecoderSpec, rename: Callable[[str], str], prefixes: tuple[str, ...]) -> DecoderSpec:
    """Return the spec of a checkpoint that has other names, and tensors with these prefixes for images."""
    sources = {part: replace(source, stem=rename(source.stem)) for part, source in spec.sources.items()}
    return replace(
        spec,
        sources=MappingProxyType(sources),
        ignored_tensors=frozenset(map(rename, spec.ignored_tensors)),
        ignored_prefixes=prefixes,
    )
