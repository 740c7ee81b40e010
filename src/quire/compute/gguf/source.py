"""GgufFile: a model in a GGUF file, as a `ModelSource` with the files of a Hugging Face folder.

Its image encoder, if it has one, is in a second file, or in the same one (projector.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from quire.compute.gguf.header import PART, GgufHeader, parts_of
from quire.compute.gguf.projector import PairTensors, Projector
from quire.compute.gguf.settings import config_of, dense_config_of, file_type_of, pooling_config_of
from quire.compute.gguf.tensors import GgufTensors
from quire.compute.gguf.tokenizer import tokenizer_config_of, tokenizer_json_of
from quire.compute.gguf.vision.kinds import own_encoder_of
from quire.compute.gguf.vocabulary import generation_config_of
from quire.core.errors import CheckpointError
from quire.core.model_files import MAX_SETTINGS_BYTES

OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json")
TOKENIZER = "tokenizer.json"
POOLING = "1_Pooling/config.json"
FOR_IMAGES = "preprocessor_config.json"


def is_later_part(path: Path) -> bool:
    """Return whether a path names a later part of a model."""
    split = PART.fullmatch(path.name)
    return split is not None and int(split["number"]) != 1


def has_image_encoder(name: str) -> bool:
    """Return whether a GGUF file is named as llama.cpp names one with an image encoder.

    >>> has_image_encoder("mmproj-model-f16.gguf"), has_image_encoder("llava-mmproj.gguf"), has_image_encoder("a.gguf")
    (True, True, False)
    """
    return "mmproj" in name.lower()


@dataclass(frozen=True)
class GgufFile:
    """Implements `ModelSource`. The headers are read once, at first use.

    `image_encoder`: the file with it, perhaps the same; None: the model reads text only. `notices`: why a file next to
    it is not used.
    """

    path: Path
    image_encoder: Path | None = field(default=None, kw_only=True)
    notices: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def name(self) -> str:
        """The path of the file."""
        return str(self.path)

    @property
    def second_file(self) -> Path | None:
        """The file with the image encoder, if it is another one."""
        return None if self.image_encoder == self.path else self.image_encoder

    @property
    def has_own_encoder(self) -> bool:
        """Whether the file has an image encoder next to the text model. Reads the header."""
        return own_encoder_of(self._header) is not None

    @property
    def type(self) -> str:
        """The format of its numbers, such as Q4_K_M."""
        return file_type_of(self._header)

    def where(self, file: str) -> str:
        """Return the path of the GGUF file that has the content of a file of this name, or those of both."""
        second = self.second_file
        if second is None or file == TOKENIZER:
            return self.name
        return str(second) if file == FOR_IMAGES else f"{self.name} with {second.name}"

    def has(self, file: str) -> bool:
        """Return whether the GGUF file has the content of a file of this name."""
        has_images = file == FOR_IMAGES and self.image_encoder is not None
        return file in (*OBJECTS, TOKENIZER) or has_images or self._step(file) is not None

    def text(self, file: str, max_bytes: int = MAX_SETTINGS_BYTES) -> str:
        """Return the text of a file of this name."""
        text = self._tokenizer_json if file == TOKENIZER else json.dumps(self.json_object(file))
        if len(text) > max_bytes:
            raise CheckpointError(f"{self.name}: {file}", f"{len(text)} bytes", f"at most {max_bytes}")
        return text

    def json_object(self, file: str, max_bytes: int = MAX_SETTINGS_BYTES) -> dict[str, object]:
        """Return the settings in a file of this name."""
        match file:
            case "config.json":
                config = config_of(self._header, self._tensors.setting)
                return config if self._projector is None else self._projector.config(config)
            case "generation_config.json":
                return generation_config_of(self._header)
            case "tokenizer_config.json":
                return tokenizer_config_of(self._header)
        if file == FOR_IMAGES and self._projector is not None:
            return self._projector.processor()
        if (step := self._step(file)) is not None:
            return step
        raise CheckpointError(self.name, f"without what {file} says", f"one of {', '.join(OBJECTS)}")

    def _step(self, file: str) -> dict[str, object] | None:
        """Return the settings of a step after the model, None if the file has none."""
        return pooling_config_of(self._header) if file == POOLING else dense_config_of(self._header, file)

    def tensors_of(self, folder: str) -> GgufTensors:
        """Return all tensors: those of steps have the names of their folders."""
        return self._tensors

    def tensors(self) -> GgufTensors:
        """Return the tensors, already checked with the header; maps nothing yet."""
        return self._tensors

    def block_types(self) -> Mapping[str, str]:
        """Return the block types of the matrices that are not stored as floats, by name."""
        return self._tensors.block_types

    def weight_paths(self) -> list[Path]:
        """Return the file, or all its parts, and that of the image encoder."""
        paths = [self.path.with_name(name) for name in parts_of(self.path.name)]
        return paths if self.second_file is None else [*paths, self.second_file]

    @cached_property
    def _header(self) -> GgufHeader:
        return GgufHeader.read(self.path)

    @cached_property
    def _tensors(self) -> GgufTensors:
        return GgufTensors(self._header) if self._projector is None else PairTensors(self._projector)

    @cached_property
    def _projector(self) -> Projector | None:
        return None if self.image_encoder is None else Projector.read(self.image_encoder, self._header)

    @cached_property
    def _tokenizer_json(self) -> str:
        return tokenizer_json_of(self._header)
