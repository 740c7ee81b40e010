"""GgufFile: a model in a GGUF file, as a `ModelSource` with the files of a Hugging Face folder.

Its image encoder, if it has one, is in a second file, or in the same one (projector.py). What is in the files:
contents.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from quire.compute.gguf.header import PART, parts_of
from quire.core.errors import CheckpointError
from quire.core.model_files import MAX_SETTINGS_BYTES

if TYPE_CHECKING:
    from quire.compute.gguf.contents import GgufContents
    from quire.compute.gguf.tensors import GgufTensors

OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json")
TOKENIZER = "tokenizer.json"
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
        return self._contents.has_own_encoder

    @property
    def type(self) -> str:
        """The format of its numbers, such as Q4_K_M."""
        return self._contents.type

    def where(self, file: str) -> str:
        """Return the path of the GGUF file that has the content of a file of this name, or those of both."""
        second = self.second_file
        if second is None or file == TOKENIZER:
            return self.name
        return str(second) if file == FOR_IMAGES else f"{self.name} with {second.name}"

    def has(self, file: str) -> bool:
        """Return whether the GGUF file has the content of a file of this name."""
        has_images = file == FOR_IMAGES and self.image_encoder is not None
        return file in (*OBJECTS, TOKENIZER) or has_images or self._contents.step(file) is not None

    def text(self, file: str, max_bytes: int = MAX_SETTINGS_BYTES) -> str:
        """Return the text of a file of this name."""
        text = self._contents.tokenizer_json if file == TOKENIZER else json.dumps(self.json_object(file))
        if len(text) > max_bytes:
            raise CheckpointError(f"{self.name}: {file}", f"{len(text)} bytes", f"at most {max_bytes}")
        return text

    def json_object(self, file: str, max_bytes: int = MAX_SETTINGS_BYTES) -> dict[str, object]:
        """Return the settings in a file of this name."""
        contents = self._contents
        found = contents.processor() if file == FOR_IMAGES else contents.json_object(file)
        if found is None:
            raise CheckpointError(self.name, f"without what {file} says", f"one of {', '.join(OBJECTS)}")
        return found

    def tensors_of(self, folder: str) -> GgufTensors:
        """Return all tensors: those of steps have the names of their folders."""
        return self._contents.tensors

    def tensors(self) -> GgufTensors:
        """Return the tensors, already checked with the header; maps nothing yet."""
        return self._contents.tensors

    def block_types(self) -> Mapping[str, str]:
        """Return the block types of the matrices that are not stored as floats, by name."""
        return self._contents.tensors.block_types

    def weight_paths(self) -> list[Path]:
        """Return the file, or all its parts, and that of the image encoder."""
        paths = [self.path.with_name(name) for name in parts_of(self.path.name)]
        return paths if self.second_file is None else [*paths, self.second_file]

    @cached_property
    def _contents(self) -> GgufContents:
        from quire.compute.gguf.contents import GgufContents

        return GgufContents(self.path, self.image_encoder)
