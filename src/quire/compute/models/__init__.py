"""Model families: what a model folder holds, read from its settings alone.

`read_model` answers what must be known before any memory is allocated: the spec, from it the shape
of the KV cache, the vocabulary, the context length, and which tokens end a text. A family is one
module with a function `decoder_spec(config)`, imported only when a folder asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import CONFIG_FILE, GENERATION_CONFIG_FILE, ConfigFile

FAMILIES: Final = MappingProxyType({"Qwen3ForCausalLM": "quire.compute.models.qwen3"})
"""The first of `architectures` in config.json → the module of its family."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a model folder's settings say; `spec` knows vocabulary, context length, KV cache."""

    architecture: str
    spec: DecoderSpec
    eos_token_ids: tuple[int, ...]


def read_model(folder: Path) -> ModelDescription:
    """Read the settings of a model folder; touches no weights."""
    config = ConfigFile.read(folder / CONFIG_FILE)
    architectures = config.texts("architectures")
    if not architectures or architectures[0] not in FAMILIES:
        raise config.error("architectures", f"one of {', '.join(FAMILIES)} first")
    family = import_module(FAMILIES[architectures[0]])
    spec: DecoderSpec = family.decoder_spec(config)
    return ModelDescription(architectures[0], spec, _eos_token_ids(folder, config, spec.vocab_size))


def _eos_token_ids(folder: Path, config: ConfigFile, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end a text; the settings for generation go first."""
    path = folder / GENERATION_CONFIG_FILE
    if path.is_file():
        chosen = ConfigFile.read(path).token_ids("eos_token_id", vocab_size)
        if chosen:
            return chosen
    return config.token_ids("eos_token_id", vocab_size)
